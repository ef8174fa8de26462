"""Turn each msc collective into local layout ops, a start node and a wait node.

    %y: f32[2,8,4] = msc.all_gather(%x, 1, [4], 'tp', 2, 'reduce_scatter')

    %start:   f32[4,4,4]   = c10d.all_gather_into_tensor(%x, 2, 'tp')      # x is f32[2,4,4]
    %wait:    f32[4,4,4]   = c10d.wait_tensor(%start)
    %view:    f32[2,2,4,4] = aten.view(%wait, [2, 2, 4, 4])
    %permute: f32[2,2,4,4] = aten.permute(%view, [1, 0, 2, 3])
    %clone:   f32[2,2,4,4] = aten.clone(%permute)
    %y:       f32[2,8,4]   = aten.view(%clone, [2, 8, 4])

torch's collectives concatenate and scatter along dim 0 of contiguous tensors, so any other dim, and
any dim of several runs, costs one copy of the gathered tensor, written out here for the scheduler
to see. `grad_reduce` becomes its input; `shard`, `shard_pad` and `logsumexp_grad` are local and
stay.

Numerics: kept bit for bit, except that a logsumexp becomes max, exp, sum and log (rounding).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed  # registers torch.ops._c10d_functional
from torch import fx

from msc.ir.errors import VerifyError
from msc.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, GRAD_REDUCE, REDUCE_SCATTER
from msc.ir.ops.library import arguments
from msc.ir.values import carry, describe, tensor_of, tensors_of, where

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def lower_collectives(gm: fx.GraphModule) -> int:
    """Rewrite every msc collective of `gm` in place and return how many there were.

    The group of each start node is the name of the mesh axis. Every new node has its `val`; the one
    that takes the collective's place also has the rest of its meta.
    """
    found = [node for node in gm.graph.nodes if node.target in _LOWERINGS]
    for node in found:
        attrs = arguments(node.target, node.args, node.kwargs)
        with gm.graph.inserting_before(node):
            result = _LOWERINGS[node.target](_Builder(node), **attrs)
        _replace(node, result)
    if found:
        gm.recompile()
    return len(found)


def _replace(old: fx.Node, new: fx.Node) -> None:
    before, after = tensor_of(old), tensor_of(new)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise VerifyError(
            f"lowering %{old.name} ({where(old)}) gives {describe(after)} in place of "
            f"{describe(before)}. This is a bug in lower_collectives."
        )
    if new not in old.all_input_nodes:
        new.meta.update({key: value for key, value in old.meta.items() if key != "val"})
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


@dataclass(frozen=True)
class _Builder:
    """Inserts the nodes that stand for `old`, with their values."""

    old: fx.Node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A local op; its value comes from running it on the values of its operands."""
        node = self.old.graph.call_function(target, args, kwargs)
        with torch.no_grad():
            values = fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return carry(self.old, node)

    def communicate(self, target: Any, x: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """Start and wait; `shape` is the result's."""
        x = self.contiguous(x)
        start = self.old.graph.call_function(target, (x, *args))
        wait = self.old.graph.call_function(_c10d.wait_tensor.default, (start,))
        for node in (start, wait):
            node.meta["val"] = tensor_of(x).new_empty(tuple(shape))
            carry(self.old, node)
        return wait

    def contiguous(self, x: fx.Node) -> fx.Node:
        return x if tensor_of(x).is_contiguous() else self.copy(x)

    def copy(self, x: fx.Node) -> fx.Node:
        return self.call(_aten.clone.default, x, memory_format=torch.contiguous_format)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        if tuple(tensor_of(x).shape) == tuple(shape):
            return x
        return self.call(_aten.view.default, x, list(shape))

    def permute(self, x: fx.Node, *order: int) -> fx.Node:
        return self.call(_aten.permute.default, x, list(order))

    def pieces(self, target: Any, x: fx.Node, *args: Any) -> list[fx.Node]:
        """The results of an op that yields a list."""
        whole = self.call(target, x, *args)
        count = len(tensors_of(whole))
        return [self.call(operator.getitem, whole, index) for index in range(count)]

    def split(self, x: fx.Node, lengths: Sequence[int], dim: int) -> list[fx.Node]:
        return self.pieces(_aten.split_with_sizes.default, x, list(lengths), dim)


def _around(x: fx.Node, dim: int) -> tuple[int, int]:
    """The number of elements before and behind `dim`."""
    shape = tensor_of(x).shape
    return math.prod(shape[:dim]), math.prod(shape[dim + 1 :])


def _scaled_shape(x: fx.Node, dim: int, numerator: int, denominator: int = 1) -> list[int]:
    shape = list(tensor_of(x).shape)
    shape[dim] = shape[dim] * numerator // denominator
    return shape


def _all_gather(
    build: _Builder,
    x: fx.Node,
    dim: int,
    runs: Sequence[int],
    axis: str,
    size: int,
    grad: str,
    index: fx.Node | None,
) -> fx.Node:
    if size == 1:
        return build.contiguous(x)
    before, behind = _around(x, dim)
    shape = _scaled_shape(x, dim, size)
    gathered = _scaled_shape(x, 0, size)
    # In memory: [size, before, runs, behind], wanted as [before, (run, size), behind].
    y = build.communicate(_c10d.all_gather_into_tensor.default, x, gathered, size, axis)
    if len(set(runs)) == 1:
        if len(runs) == 1 and before > 1:
            y = build.view(y, (size, before, runs[0], behind))
            y = build.copy(build.permute(y, 1, 0, 2, 3))
        elif len(runs) > 1:
            y = build.view(y, (size, before, len(runs), runs[0], behind))
            y = build.copy(build.permute(y, 1, 2, 0, 3, 4))
        return build.view(y, shape)
    if before == 1:
        flat = build.view(y, (size * sum(runs), behind))
        parts = build.split(flat, list(runs) * size, 0)
        along = 0
    else:
        flat = build.view(y, (size, before, sum(runs), behind))
        ranks = build.pieces(_aten.unbind.int, flat)
        parts = [part for rank in ranks for part in build.split(rank, runs, 1)]
        along = 1
    ordered = [parts[rank * len(runs) + run] for run in range(len(runs)) for rank in range(size)]
    return build.view(build.call(_aten.cat.default, ordered, along), shape)


def _reduce_scatter(
    build: _Builder, x: fx.Node, dim: int, runs: Sequence[int], axis: str, size: int
) -> fx.Node:
    if size == 1:
        return build.contiguous(x)
    before, behind = _around(x, dim)
    shape = _scaled_shape(x, dim, 1, size)

    def scatter(arranged: fx.Node) -> fx.Node:
        part = _scaled_shape(arranged, 0, 1, size)
        target = _c10d.reduce_scatter_tensor.default
        return build.communicate(target, arranged, part, "sum", size, axis)

    if len(runs) == 1 and dim == 0:
        return scatter(x)
    x = build.contiguous(x)
    # In memory: [before, (run, size), behind], wanted as [size, before, runs, behind].
    if len(set(runs)) == 1:
        if len(runs) == 1 and before == 1:
            return build.view(scatter(build.view(x, (size * runs[0], behind))), shape)
        x = build.view(x, (before, len(runs), size, runs[0], behind))
        return build.view(scatter(build.copy(build.permute(x, 2, 0, 1, 3, 4))), shape)
    flat = build.view(x, (before, size * sum(runs), behind))
    # Bringing the dim to the front lets one cat arrange all ranks; only the local result, a part
    # 1/size of it, is then turned back.
    lengths = [run for run in runs for _ in range(size)]
    parts = build.split(build.permute(flat, 1, 0, 2), lengths, 0)
    ordered = [parts[run * size + rank] for rank in range(size) for run in range(len(runs))]
    local = scatter(build.call(_aten.cat.default, ordered, 0))
    if before > 1:
        local = build.copy(build.permute(local, 1, 0, 2))
    return build.view(local, shape)


def _all_reduce(build: _Builder, x: fx.Node, op: str, axis: str, size: int, grad: str) -> fx.Node:
    if size == 1:
        return build.contiguous(x)

    def reduce(value: fx.Node, how: str) -> fx.Node:
        shape = tensor_of(value).shape
        return build.communicate(_c10d.all_reduce.default, value, shape, how, axis)

    if op != "logsumexp":
        return reduce(x, op)
    highest = reduce(x, "max")
    # Where all ranks have -inf, or one has inf, x - max would be NaN; subtracting 0 is right there.
    endless = build.call(_aten.isinf.default, highest)
    shift = build.call(_aten.masked_fill.Scalar, highest, endless, 0.0)
    share = build.call(_aten.exp.default, build.call(_aten.sub.Tensor, x, shift))
    total = build.call(_aten.log.default, reduce(share, "sum"))
    return build.call(_aten.add.Tensor, total, shift)


def _grad_reduce(build: _Builder, x: fx.Node, axis: str, size: int) -> fx.Node:
    return x


_LOWERINGS: dict[Any, Callable[..., fx.Node]] = {
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_REDUCE: _all_reduce,
    GRAD_REDUCE: _grad_reduce,
}
