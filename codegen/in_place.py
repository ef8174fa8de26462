"""Which pointwise ops may write their result over an operand that nothing reads afterwards.

    y = msc_linear(a, w)                 y = msc_linear(a, w)
    z = torch.add(x, y)            ->    z = add_(y, x)
    del y                                del y

Saves an allocation and the memory traffic of fresh pages, which for a large tensor costs more than
the sum. Numerics: kept bit for bit.

An operand may be overwritten if its memory was made in this graph, no value that could share that
memory is read later, and no communication that is not waited for may still read it. What is not
known to make memory of its own is taken to share that of all its operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from msc.ir.communication import STARTS, WAITS
from msc.ir.ops.gate import GATED_BACKWARD, gated_backward_
from msc.ir.ops.library import KERNELS
from msc.ir.ops.linear import LINEAR_DGRAD, add_linear_dgrad_
from msc.ir.ops.norm_sum import ADD_LAYER_NORM, ADD_RMS_NORM, add_layer_norm_, add_rms_norm_

_aten = torch.ops.aten

_MAKES_MEMORY = {
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.div.Tensor,
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.gelu.default,
    _aten.gelu_backward.default,
    _aten.silu.default,
    _aten.silu_backward.default,
    _aten.native_layer_norm.default,
    _aten.native_layer_norm_backward.default,
    _aten.clone.default,
    _aten.cat.default,
    _aten.sum.dim_IntList,
}
"""Ops whose results never share memory with an operand, besides all of the namespace `msc`."""


def _over_gradient(function: Any) -> Callable[..., Tensor]:
    def run(gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = function(gradient, *args, **kwargs, grad_input=gradient)
        return result

    run.__name__ = f"{function.__name__.partition('.')[0]}_"
    return run


_FORMS: dict[Any, tuple[Callable[..., Any], tuple[int, ...]]] = {
    _aten.add.Tensor: (torch.Tensor.add_, (0, 1)),
    _aten.mul.Tensor: (torch.Tensor.mul_, (0, 1)),
    _aten.sub.Tensor: (torch.Tensor.sub_, (0,)),
    _aten.div.Tensor: (torch.Tensor.div_, (0,)),
    _aten.gelu_backward.default: (_over_gradient(_aten.gelu_backward.grad_input), (0,)),
    _aten.silu_backward.default: (_over_gradient(_aten.silu_backward.grad_input), (0,)),
    LINEAR_DGRAD: (add_linear_dgrad_, (3,)),
    GATED_BACKWARD: (gated_backward_, (0,)),
    ADD_LAYER_NORM: (add_layer_norm_, (0, 1)),
    ADD_RMS_NORM: (add_rms_norm_, (0, 1)),
}
"""The form of an op that overwrites its first operand, and which operands may stand there.

Of several results it is the first that lies over the operand.
"""


@dataclass(eq=False)
class _Memory:
    """Memory that the values of some nodes may share; `kept`: it is not ours to write to."""

    values: list[fx.Node]
    kept: bool


def in_place_calls(module: fx.GraphModule) -> dict[fx.Node, tuple[Callable[..., Any], int]]:
    """For each node that may overwrite an operand: the function, and the position of the operand.

    The function takes that operand first and the others after it.
    """
    if not any(node.target in _FORMS for node in module.graph.nodes):
        return {}
    memory = _memory(module)
    position = {node: number for number, node in enumerate(module.graph.nodes)}

    def may_overwrite(operand: Any, node: fx.Node) -> bool:
        if not isinstance(operand, fx.Node) or not _alike(operand, node):
            return False
        own = memory[operand]
        if own.kept or any(o is not operand and memory[o] is own for o in node.all_input_nodes):
            return False
        last = max(position[user] for value in own.values for user in value.users)
        return last == position[node]

    found: dict[fx.Node, tuple[Callable[..., Any], int]] = {}
    for node in module.graph.nodes:
        function, candidates = _FORMS.get(node.target, (None, ()))
        for index in candidates:
            if function is None or index >= len(node.args) or (index and node.kwargs):
                continue
            if may_overwrite(node.args[index], node):
                found[node] = (function, index)
                break
    return found


def _alike(left: fx.Node, right: fx.Node) -> bool:
    """Whether a value and the (first) result of a node are of one shape, dtype and layout."""
    one, other = left.meta.get("val"), right.meta.get("val")
    other = other[0] if isinstance(other, tuple) else other
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.stride() == other.stride()
    )


def _memory(module: fx.GraphModule) -> dict[fx.Node, _Memory]:
    memory: dict[fx.Node, _Memory] = {}
    for node in module.graph.nodes:
        shared = [] if _makes_memory(node) else [memory[o] for o in node.all_input_nodes]
        outside = node.op != "call_function" or node.target in STARTS
        merged = _Memory([node], outside or any(own.kept for own in shared))
        for own in dict.fromkeys(shared):
            merged.values += own.values
        for value in merged.values:
            memory[value] = merged
    return memory


def _makes_memory(node: fx.Node) -> bool:
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _makes_memory(node.args[0])  # results of one op lie apart
    return node.target in WAITS or node.target in _MAKES_MEMORY or node.target in KERNELS
