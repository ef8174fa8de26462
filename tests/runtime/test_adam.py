"""Adam and AdamW on one rank's tensors: torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from msc.runtime.adam import adam

SHAPES = [(3, 2), (), (5,)]
BETAS, EPS = (0.8, 0.95), 1e-6


def randoms(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in SHAPES]


def zeros(dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    return [[torch.zeros(shape, dtype=dtype) for shape in SHAPES] for _ in range(2)]


def by_torch(kind: Any, absent: int | None, steps: int, decay: float) -> list[Tensor]:
    """torch's own optimizer, tensor by tensor, without any fused or batched kernel."""
    own = [torch.nn.Parameter(value.clone()) for value in randoms(0)]
    optimizer = kind(own, lr=0.01, betas=BETAS, eps=EPS, weight_decay=decay, foreach=False)
    for step in range(steps):
        for index, (value, gradient) in enumerate(zip(own, randoms(10 + step), strict=True)):
            value.grad = None if index == absent else gradient
        optimizer.step()
    return [value.detach() for value in own]


@pytest.mark.parametrize("absent", [None, 0, 2])
@pytest.mark.parametrize(
    ("decoupled", "kind"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
def test_steps_equal_torchs(decoupled: bool, kind: Any, absent: int | None) -> None:
    expected = by_torch(kind, absent, 5, 0.1)
    parameters, states = randoms(0), zeros()
    for step in range(5):
        gradients: list[Tensor | None] = [*randoms(10 + step)]
        if absent is not None:
            gradients[absent] = None
        number = torch.tensor(step + 1)
        # a rate that is a tensor is the same rate
        lr = 0.01 if step % 2 else torch.tensor(0.01, dtype=torch.float64)
        found = adam(parameters, gradients, states, number, lr, BETAS, EPS, 0.1, decoupled)
        assert all(a is b for a, b in zip(found[0], parameters, strict=True))
        assert all(a is b for a, b in zip(found[1][1], states[1], strict=True))
    torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)


def test_the_step_is_in_the_moments_precision() -> None:
    """A bfloat16 parameter with float32 moments is rounded once a step, not at each operation."""
    low = randoms(0, torch.bfloat16)
    exact = [value.float() for value in low]
    states = [zeros(torch.float32) for _ in range(2)]
    rest = (torch.tensor(1), 0.01, (0.9, 0.999), 1e-8, 0.1, True)
    adam(low, randoms(1, torch.bfloat16), states[0], *rest)
    adam(exact, [g.float() for g in randoms(1, torch.bfloat16)], states[1], *rest)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(low, exact, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(states[0][0], states[1][0], strict=True))
