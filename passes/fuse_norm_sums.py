"""Make one op of a norm and the residual sum before it, and of its gradient and the sum behind.

    %s = aten.add(%x, %r)                     %f = msc.add_rms_norm(%x, %r, %w, 1e-05)
    %n = msc.rms_norm(%s, %w, 1e-05)    ->    %s, %y = %f[0], %f[1]
    %y = %n[0]

    %b = msc.rms_norm_backward(%gy, %s, %w, %rstd)
    %g = aten.add(%b[0], %gs)           ->    %f = msc.rms_norm_backward_add(%gy, .., %rstd, %gs)

A kernel then reads the stream once less forward, and twice less backward. After recomputation,
which chooses among the single calls, and before fuse-epilogue: a sum that a norm reads is the
norm's, since kernels compute norms wherever there are any, and products only where the library is
slower.
Numerics: kept bit for bit in ATen.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir.ops.norm import RMS_NORM, RMS_NORM_BACKWARD
from msc.ir.ops.norm_sum import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM_BACKWARD_ADD,
    RMS_NORM_BACKWARD_ADD,
)
from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.rewrites import Finding
from msc.ir.values import tensor_of
from msc.ir.walks import is_before, num_reads
from msc.passes.block_graphs import block_graphs
from msc.passes.compilation import Compilation
from msc.passes.several_results import call_before, take_over

_aten = torch.ops.aten
_ADD = _aten.add.Tensor
_FORWARD: dict[Any, Any] = {_aten.native_layer_norm.default: ADD_LAYER_NORM, RMS_NORM: ADD_RMS_NORM}
_BACKWARD: dict[Any, Any] = {
    _aten.native_layer_norm_backward.default: LAYER_NORM_BACKWARD_ADD,
    RMS_NORM_BACKWARD: RMS_NORM_BACKWARD_ADD,
}


@dataclass(frozen=True)
class FuseNormSums(UnitPass):
    """One op in place of each norm, or gradient of one, and the sum beside it."""

    name: ClassVar[str] = "fuse-norm-sums"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        unit.norm_sums = []
        changes = 0
        for gm, only in block_graphs(unit):
            found = list(fuse_sums_of(gm, only))
            changes += sum(each.changed for each in found)
            if any(each.changed for each in found):
                gm.recompile()
            # other variants find the same
            unit.norm_sums += [each for each in found if each not in unit.norm_sums]
        unit.remark(*map(str, unit.norm_sums))
        return changes


def fuse_sums_of(gm: fx.GraphModule, only: str) -> Iterator[Finding]:
    """Fuse what can be fused in one graph, and say what became of each place.

    only: the stage of a graph that other stages do not have.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target in _FORWARD and _is_sum(node.args[0]):
            norm, total = node, node.args[0]
            reason = _against_forward(norm, total)
        elif _is_sum(node) and (norm := _gradient(node)) is not None:
            total = node
            reason = _against_backward(norm, total)
        else:
            continue
        where = norm.meta.get("module_path") or f"%{norm.name}"
        phase = norm.meta.get("phase")
        where += f", {_name(norm)}" + (f" in the {phase}" if phase else "") + only
        if not reason:
            (_fuse_forward if norm.target in _FORWARD else _fuse_backward)(norm, total)
        what = reason or "the sum is made in the norm's pass"
        yield Finding(FuseNormSums.name, where, not reason, what)


def _name(norm: fx.Node) -> str:
    return str(norm.target).split(".")[1]


def _is_sum(node: Any) -> bool:
    plain = isinstance(node, fx.Node) and node.target is _ADD and not node.kwargs
    return plain and all(isinstance(operand, fx.Node) for operand in node.args)


def _against_forward(norm: fx.Node, total: fx.Node) -> str:
    """Why a norm cannot take the sum that it reads, or ""."""
    if reason := _against_sum(total):
        return reason
    if any(is_before(reader, norm) for reader in total.users):
        return "something else reads the sum before the norm can be made"
    return ""


def _gradient(total: fx.Node) -> fx.Node | None:
    """The gradient of a norm, whose gradient of the stream a sum adds to another value."""
    for operand in total.args:
        if isinstance(operand, fx.Node) and operand.target is operator.getitem:
            call, index = operand.args
            if isinstance(call, fx.Node) and call.target in _BACKWARD and index == 0:
                return call
    return None


def _against_backward(norm: fx.Node, total: fx.Node) -> str:
    """Why the gradient of a norm cannot be added to another value by its op, or ""."""
    if reason := _against_sum(total):
        return reason
    (own,) = (item for item in norm.users if item.args[1] == 0)
    if num_reads(own) > 1 or total.args.count(own) > 1:
        return "something else reads the gradient without the sum"
    if all(operand in norm.users for operand in total.args):
        return "the sum is of two gradients of the same norm"
    if any(is_before(reader, total) for item in norm.users for reader in item.users):
        return "the gradient of its weight is read before the sum can be made"
    return ""


def _against_sum(total: fx.Node) -> str:
    value = tensor_of(total)
    operands = [tensor_of(operand) for operand in total.all_input_nodes]
    if any(each.shape != value.shape or each.dtype != value.dtype for each in operands):
        return "the sum is of several shapes or dtypes"
    return "" if value.is_contiguous() else "the sum is not contiguous"


def _fuse_forward(norm: fx.Node, total: fx.Node) -> None:
    args = (*total.args, *norm.args[1:])
    fused = call_before(norm, _FORWARD[norm.target], args, [norm, total])
    for item in list(norm.users):
        index: Any = item.args[1]
        take_over(fused, index + 1, item)
    norm.graph.erase_node(norm)
    take_over(fused, 0, total)


def _fuse_backward(norm: fx.Node, total: fx.Node) -> None:
    (own,) = (item for item in norm.users if item.args[1] == 0)
    (other,) = (operand for operand in total.args if operand is not own)
    place = {0: 0, 1: 1}
    args: Sequence[Any] = norm.args
    if norm.target is not RMS_NORM_BACKWARD:
        *args, (_, with_weight, with_bias) = args
        args += [with_weight, with_bias]
        place = {0: 0, 1: 1, 2: 1 + with_weight}
    fused = call_before(total, _BACKWARD[norm.target], (*args, other), [norm, total])
    for item in list(norm.users):
        if item is not own:
            take_over(fused, place[item.args[1]], item)  # type: ignore[index]
    take_over(fused, 0, total)
    norm.graph.erase_node(own)
    norm.graph.erase_node(norm)
