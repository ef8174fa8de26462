from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.normalize.one_op import normalized, random, targets

LINEAR, ADD, RESHAPE, SUM = (
    "msc.linear.default",
    "aten.add.Tensor",
    "aten.reshape.default",
    "aten.sum.default",
)


@pytest.mark.parametrize(
    ("function", "weight", "expected"),
    [
        (lambda w, b, x: functional.linear(x, w, b), (5, 4), [LINEAR, ADD]),
        (lambda w, b, x: functional.linear(x, w) * b.sum(), (5, 4), [LINEAR]),
        (lambda w, b, x: x @ w + b, (4, 5), [LINEAR, ADD]),
        (lambda w, b, x: x @ w.t() + b, (5, 4), [LINEAR, ADD]),
        (lambda w, b, x: x @ w.T + b, (5, 4), [LINEAR, ADD]),
        (lambda w, b, x: x @ w.permute(1, 0) + b, (5, 4), [LINEAR, ADD]),
        (lambda w, b, x: x @ w.transpose(-1, -2) + b, (5, 4), [LINEAR, ADD]),
        (
            lambda w, b, x: torch.addmm(b, x.view(-1, 4), w).view(3, 2, 5),
            (4, 5),
            [LINEAR, ADD],
        ),
        (lambda w, b, x: torch.addmm(b, x.view(-1, 4), w), (4, 5), [LINEAR, ADD, RESHAPE]),
        (lambda w, b, x: torch.mm(x.view(-1, 4), w.t()) + b, (5, 4), [LINEAR, RESHAPE, ADD]),
    ],
)
def test_products_with_a_weight(
    function: Callable[..., Tensor], weight: tuple[int, int], expected: list[str]
) -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, b, x: (function(w, b, x) ** 2).sum(),
        [random(*weight), random(5)],
        [random(3, 2, 4)],
    )
    found = [t for t in targets(captured) if t in (LINEAR, ADD, RESHAPE)]
    assert found == expected


def test_scaled_addmm_stays() -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, b, x: torch.addmm(b, x, w, alpha=0.5).sum(),
        [random(4, 5), random(5)],
        [random(3, 4)],
    )
    assert LINEAR not in targets(captured)


def test_products_of_activations_stay() -> None:
    torch.manual_seed(0)
    captured = normalized(lambda w, x: ((x * w) @ (x * w).t()).sum(), [random(4)], [random(3, 4)])
    assert LINEAR not in targets(captured)
