"""Raise products with a weight to `msc.linear`.

    %y: f32[8,4,16] = aten.linear(%x, %w, %b)
        ->   %linear: f32[8,4,16] = msc.linear(%x, %w)
             %y: f32[8,4,16] = aten.add.Tensor(%linear, %b)

The bias is split off, so that it is added once where the product is a partial sum. `addmm`, `mm`
and `matmul` with a parameter (or its transpose) are raised too, without the flattening of the
leading dims around them:

    %v: f32[32,8] = aten.view(%x, [-1, 8])
    %a: f32[32,16] = aten.addmm(%b, %v, %w)        ->   msc.linear(%x, %w, None, True), + %b
    %y: f32[8,4,16] = aten.view(%a, [8, 4, 16])

Numerics: may change by rounding, where `addmm` fused the bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.passes import GraphPass
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    calls,
    is_parameter,
    named_arguments,
    replace,
    shape_of,
)

_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default}


def raise_linear(gm: fx.GraphModule) -> int:
    """Raise every product with a weight; returns their number."""
    raised = 0
    for node in calls(
        gm, aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default
    ):
        raised += _raise(gm, node)
    return raised


def _raise(gm: fx.GraphModule, node: fx.Node) -> bool:
    operands = _operands(node)
    if operands is None:
        return False
    x, weight, bias, transposed = operands
    emit = Emitter(gm, node)
    num_out = shape_of(weight)[1 if transposed else 0]
    whole = _unflattened(x)
    shape = (*shape_of(whole)[:-1], num_out)
    extra = (None, True) if transposed else ()
    y = emit(torch.ops.msc.linear.default, whole, weight, *extra, shape=shape, like=node)
    if bias is not None:
        y = emit(aten.add.Tensor, y, bias, shape=shape, like=node)
    if shape != shape_of(node):
        for user in list(node.users):
            if user.target in _VIEWS and shape_of(user) == shape:
                replace(user, y)
        if node.users:
            y = emit(aten.reshape.default, y, list(shape_of(node)), shape=shape_of(node))
    replace(node, y)
    return True


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """x, weight, bias, and whether the weight is stored `[k, n]`; None if it is no linear layer."""
    args: dict[str, Any] = named_arguments(node, {"bias": None, "beta": 1, "alpha": 1})
    if node.target is aten.linear.default:
        x, weight, bias = args["input"], args["weight"], args["bias"]
        fits = len(shape_of(x)) >= 2 and len(shape_of(weight)) == 2
        return (x, weight, bias, False) if fits else None
    if node.target is aten.addmm.default:
        x, weight, bias = args["mat1"], args["mat2"], args["self"]
        if args["beta"] != 1 or args["alpha"] != 1 or len(shape_of(bias)) != 1:
            return None
        if shape_of(bias)[0] != shape_of(weight)[1]:
            return None  # broadcast from one number
    elif node.target is aten.mm.default:
        x, weight, bias = args["self"], args["mat2"], None
    else:
        x, weight, bias = args["self"], args["other"], None
        if len(shape_of(x)) < 2:
            return None
    stored = _untransposed(weight)
    if stored is not None and is_parameter(stored):
        return x, stored, bias, False
    return (x, weight, bias, True) if is_parameter(weight) and len(shape_of(weight)) == 2 else None


def _untransposed(weight: fx.Node) -> fx.Node | None:
    """The matrix whose transpose `weight` is; None if it is no transpose."""
    if weight.target not in _TRANSPOSES or len(shape_of(weight)) != 2:
        return None
    (source,) = weight.all_input_nodes
    if weight.target is aten.permute.default:
        order: Any = weight.args[1]
        return source if [dim % 2 for dim in order] == [1, 0] else None
    if weight.target is aten.transpose.int:
        first, second = weight.args[1:]
        return source if (first - second) % 2 == 1 else None  # type: ignore[operator]
    return source


def _unflattened(x: fx.Node) -> fx.Node:
    """What `x` flattens the leading dims of; `x` itself if it flattens nothing."""
    source = x.args[0] if x.target in _VIEWS else x
    assert isinstance(source, fx.Node)
    before, after = shape_of(source), shape_of(x)
    flattened = len(before) > 2 and after == (math.prod(before[:-1]), before[-1])
    return source if flattened else x


@dataclass(frozen=True)
class RaiseLinear(GraphPass):
    """`raise_linear` as a pass."""

    name: ClassVar[str] = "raise-linear"
    numerics: ClassVar[str] = "may change by rounding, where addmm fused the bias"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Raise every product with a weight."""
        return raise_linear(gm)
