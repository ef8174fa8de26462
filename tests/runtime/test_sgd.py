"""SGD on one rank's tensors: torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msc.runtime.sgd import sgd
from tests.runtime.test_adam import SHAPES, randoms

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_equal_torchs(options: dict[str, Any]) -> None:
    own = [torch.nn.Parameter(value) for value in randoms(0)]
    optimizer = torch.optim.SGD(own, lr=0.1, foreach=False, **options)
    given = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, **options}
    parameters = randoms(0)
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    states = [zeros] if given["momentum"] else []
    for step in range(4):
        gradients = randoms(10 + step)
        for value, gradient in zip(own, gradients, strict=True):
            value.grad = gradient.clone()
        own[2].grad = None
        optimizer.step()
        found = sgd(
            parameters, [*gradients[:2], None], states, torch.tensor(step + 1), 0.1, **given
        )
        assert all(a is b for a, b in zip(found[0], parameters, strict=True))
        assert len(found[1]) == len(states)
    expected = [value.detach() for value in own]
    torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(parameters[2], randoms(0)[2])


def test_the_gradients_stay_as_they_are() -> None:
    """The moving sum is no gradient's memory, though the first one starts it."""
    gradients, scale = randoms(1), torch.tensor(0.5, dtype=torch.float64)
    states = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]]
    rest = (0.1, 0.9, 0.0, 0.1, True, scale)
    for step in (1, 2):
        sgd(randoms(0), gradients, states, torch.tensor(step), *rest)
    assert all(torch.equal(a, b) for a, b in zip(gradients, randoms(1), strict=True))


def test_a_step_of_a_lower_precision_is_rounded_once() -> None:
    low = randoms(0, torch.bfloat16)
    exact = [value.float() for value in low]
    states = [[[torch.zeros(shape) for shape in SHAPES]] for _ in range(2)]
    rest = (torch.tensor(1), 0.01, 0.9, 0.0, 0.1, True)
    sgd(low, randoms(1, torch.bfloat16), states[0], *rest)
    sgd(exact, [g.float() for g in randoms(1, torch.bfloat16)], states[1], *rest)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(low, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_half_types_step_as_float32_and_are_rounded(dtype: torch.dtype, momentum: float) -> None:
    """Sizes that fill vectors: the CPU kernel of torch 2.13 leaves those of half types alone."""
    start, gradient = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    low, exact = start.clone(), start.float()
    rest = (torch.tensor(1), 0.5, momentum, 0.0, 0.1, False)
    states = [[[torch.zeros(100, dtype=d)]] if momentum else [] for d in (dtype, torch.float32)]
    sgd([low], [gradient], states[0], *rest)
    sgd([exact], [gradient.float()], states[1], *rest)
    assert torch.equal(low, exact.to(dtype))
    assert (low != start).float().mean() > 0.9
