"""Values that one call reads twice: a node of `torch.fx` counts such a reader once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc

Body = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Some layers, and what a case makes of them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.scale = nn.Parameter(torch.randn(8))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.norm(x)).square().sum()


def doubled(value: Tensor) -> Tensor:
    return value + value


CASES: dict[str, Body] = {
    "linear": lambda m, x: doubled(m.up(x)),
    "linear without bias": lambda m, x: doubled(m.down(x)),
    "with a norm behind": lambda m, x: m.norm(doubled(m.up(x))).sin() + doubled(m.up(x)),
    "with an RMS norm behind": lambda m, x: m.rms(doubled(m.up(x))).sin() + doubled(m.up(x)),
    "bias apart": lambda m, x: doubled(m.down(x) + m.scale),
    "activation": lambda m, x: doubled(functional.gelu(m.up(x))),
    "activation and its operand": lambda m, x: (y := m.up(x)) + functional.silu(y),
    "operand and its activation": lambda m, x: functional.gelu(y := m.up(x)) + y,
    "relu and its operand": lambda m, x: (y := m.up(x)) + torch.relu(y),
    "a gate of itself": lambda m, x: functional.silu(y := m.down(x)) * y,
    "a gate twice": lambda m, x: doubled(functional.silu(m.up(x)) * m.down(x)),
    "a product of itself": lambda m, x: (y := m.up(x)) * y,
    "a residual twice": lambda m, x: doubled(x + m.up(x)),
    "norm": lambda m, x: doubled(m.norm(m.up(x))),
    "sum of sums": lambda m, x: doubled(doubled(m.up(x)) + m.down(x)),
    "square of a sum": lambda m, x: (y := m.up(x) + m.down(x)) @ y.transpose(-1, -2) @ x,
    "softmax twice": lambda m, x: doubled(m.up(x).softmax(-1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_gradients_are_those_of_one_device(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    model, x = Model(CASES[name]), torch.randn(4, 6, 8)
    report = msc.verify(model, (x,), mesh=mesh, dtype=torch.float64, fuse_collectives=True)
    assert report.ok, report.first_difference


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_logits_that_are_added_to_themselves(mesh: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 12)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(doubled(self.head(x)), labels)

    torch.manual_seed(0)
    batch = (torch.randn(6, 8), torch.randint(0, 12, (6,)))
    report = msc.verify(Head(), batch, mesh=mesh, dtype=torch.float64, fuse_loss=True)
    assert report.ok, report.first_difference
