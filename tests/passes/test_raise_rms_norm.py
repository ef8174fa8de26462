"""Root mean square norms of a whole model become one op; what is another function stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from tests import zoo

WIDTH = 8


def counted(program: msc.Program, op: str) -> int:
    graphs = program.graphs(0).values()
    return sum(str(node.target) == op for gm in graphs for node in gm.graph.nodes)


class Model(nn.Module):
    def __init__(self, norm: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=dtype))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(torch.tanh(x), self.weight))
        return y.square().mean()


def written(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """As Hugging Face's models have it."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def raised(norm: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, **options: Any) -> int:
    torch.manual_seed(0)
    model, batch = Model(norm, dtype), (torch.randn(4, WIDTH, dtype=dtype),)
    program = msc.compile(model, batch, **options)
    wide = dtype in (torch.float32, torch.float64)
    if wide and not options:
        model.zero_grad()
        model(*batch).backward()
        found = program.run_virtual(batch).grads
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)
    count = counted(program, "msc.rms_norm.default")
    backwards = ("msc.rms_norm_backward.default", "msc.rms_norm_backward_add.default")
    assert sum(counted(program, op) for op in backwards) == count
    assert (counted(program, "aten.rsqrt.default") == 0) == (count > 0)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_raised(dtype: torch.dtype) -> None:
    assert raised(written, dtype) == 1
    assert raised(lambda x, w: functional.rms_norm(x, (WIDTH,), w), dtype) == 1
    assert raised(lambda x, w: functional.rms_norm(x, (WIDTH,), 1 + w, 1e-3), dtype) == 1
    assert raised(in_float32, dtype) == (dtype != torch.float64)  # there it would be more precise


@pytest.mark.parametrize("norm", [written, lambda x, w: functional.rms_norm(x, (WIDTH,), w)])
def test_a_norm_of_a_norm(norm: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The stream of the second is what is made of the first; so it may be read beside it."""
    assert raised(lambda x, w: norm(norm(x, w), w), torch.float64) == 2
    assert raised(lambda x, w: norm(norm(norm(x, w), w), 1 + w), torch.float32) == 3

    def beside(x: Tensor, w: Tensor) -> Tensor:
        y = norm(x, w)
        return norm(y, w) + y

    assert raised(beside, torch.float64) == 2
    # the weight of one is what another gives
    assert raised(lambda x, w: norm(x, norm(w, w)), torch.float64) == 2


def test_what_is_not() -> None:
    dtype = torch.float32
    assert raised(lambda x, w: written(x, torch.ones(())) + w, dtype) == 0
    assert raised(lambda x, w: written(x, w) + w, dtype) == 0
    assert raised(lambda x, w: written(x, w.double()).float(), dtype) == 0


def test_a_backward_keeps_no_normalized_copy() -> None:
    model, batch = zoo.build("llama").float(), zoo.batch("llama")
    program = msc.compile(model, batch)
    norms = [counted(program, f"msc.{name}rms_norm.default") for name in ("", "add_")]
    assert norms == [zoo.LAYERS + 1, zoo.LAYERS]
    assert counted(program, "aten.pow.Tensor_Scalar") == 0
