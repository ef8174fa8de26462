"""What a mask hides for certain, whatever its inputs are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from msc.capture.entry import capture
from msc.passes.normalize import normalize
from msc.passes.rewrites.hidden_keys import HiddenKeys
from tests.passes.normalize.one_op import Function, random

LOWEST = torch.finfo(torch.float64).min
S = 5
ABOVE = torch.ones(S, S, dtype=torch.bool).triu(1)
OLD = torch.ones(S, S, dtype=torch.bool).tril(-2)


def causal() -> Tensor:
    return torch.arange(S) <= torch.arange(S)[:, None]


def recent() -> Tensor:
    return torch.arange(S) > torch.arange(S)[:, None] - 2


def zero() -> Tensor:
    return torch.zeros(()).double()


def hidden(mask_of: Callable[[Tensor], Tensor], region: Tensor) -> bool:
    """Whether the mask that a function makes of padding `[b, S]` hides a region.

    The mask is what a product is added to, or a `where` chooses by.
    """

    def function(w: Tensor, x: Tensor, seen: Tensor) -> Tensor:
        mask = mask_of(seen[:, None, None, :])
        y = torch.where(mask, x * w, 0.0) if mask.dtype == torch.bool else x * w + mask
        return torch.sigmoid(y).sum()

    inputs = (random(3, 2, S, S), torch.ones(3, S, dtype=torch.bool))
    captured = capture(Function(function, [random(1)]), inputs)
    normalize(captured.graph)
    (last,) = captured.graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.sigmoid.default
    )
    (masked,) = last.all_input_nodes
    position = 0 if masked.target is torch.ops.aten.where.ScalarOther else 1
    mask = masked.args[position]
    assert isinstance(mask, fx.Node)
    return HiddenKeys(captured.graph).hides(mask, region)


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda seen: causal() & seen,
        lambda seen: ~(~causal() | ~seen),
        lambda seen: (causal() & seen).expand(3, 1, S, S),
        lambda seen: torch.where(causal() & seen, zero(), LOWEST),
        lambda seen: torch.where(~causal() | ~seen, LOWEST, zero()),
        lambda seen: torch.where(causal() & seen, zero(), LOWEST) + torch.arange(S).double(),
        # Falcon: padding and causality become numbers, and a mask again.
        lambda seen: (seen.double() * 2).masked_fill(
            torch.where(causal() & seen, zero(), LOWEST) < -1, LOWEST
        ),
        # MPT
        lambda seen: seen.double().masked_fill(
            torch.where(causal() & seen, zero(), LOWEST).bool(), LOWEST
        ),
        lambda seen: torch.where(seen, 0.0, LOWEST).masked_fill(~causal(), float("-inf")),
    ],
)
def test_causality_beside_padding(mask_of: Callable[[Tensor], Tensor]) -> None:
    assert hidden(mask_of, ABOVE)
    assert not hidden(mask_of, OLD)


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda seen: causal() | seen,
        lambda seen: seen & torch.ones(S, S, dtype=torch.bool),
        lambda seen: torch.where(causal() & seen, zero(), -3.0),
        lambda seen: torch.where(causal() & seen, LOWEST, zero()),
        lambda seen: (seen.double() * 2).masked_fill(~seen, LOWEST).expand(3, 1, S, S),
        lambda seen: (causal() & seen).mT,
        lambda seen: torch.where(causal() & seen, zero(), LOWEST) * 0.5,  # not followed
    ],
)
def test_what_is_not_certain(mask_of: Callable[[Tensor], Tensor]) -> None:
    assert not hidden(mask_of, ABOVE)


def test_windows_beside_padding() -> None:
    assert hidden(lambda seen: recent() & (causal() & seen), OLD)
    assert hidden(lambda seen: recent() & (causal() & seen), ABOVE)
