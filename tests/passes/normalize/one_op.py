"""Normalize a model whose forward is one function of a parameter, and compare it with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from msc.capture.captured import Captured
from msc.capture.entry import capture
from msc.ir.verifier import structure
from msc.passes.normalize import normalize
from tests.capture.parity import assert_parity


class Function(nn.Module):
    """`function(*parameters, *inputs)`."""

    def __init__(self, function: Callable[..., Tensor], parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(parameters)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.weights, *inputs)


def normalized(
    function: Callable[..., Tensor], parameters: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Captured:
    """The normalized graph, which computes what the function computes, with all gradients."""
    model = Function(function, parameters)
    captured = capture(model, tuple(inputs))
    assert_parity(captured, model, tuple(inputs), lambda out: out)
    normalize(captured.graph)
    assert structure(captured.graph) is None
    assert_parity(captured, model, tuple(inputs), lambda out: out)
    assert normalize(captured.graph) == 0
    return captured


def targets(captured: Captured) -> list[str]:
    """The ops of a graph in order, by name."""
    calls = [n for n in captured.graph.graph.nodes if n.op == "call_function"]
    return [str(n.target) if "built-in" not in str(n.target) else "getitem" for n in calls]


def random(*shape: int) -> Tensor:
    """Float64 numbers."""
    return torch.randn(*shape, dtype=torch.float64)
