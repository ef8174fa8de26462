"""Turn slices that take a projection apart into one split.

    %y: f32[4,96] = msc.linear(%x, %w)               %y = msc.linear(%x, %w)
    %q: f32[4,64] = aten.slice(%y, 1, 0, 64)         %p = aten.split_with_sizes(%y, [64, 16, 16], 1)
    %k: f32[4,16] = aten.slice(%y, 1, 64, 80)   ->   %q = getitem(%p, 0)
    %v: f32[4,16] = aten.slice(%y, 1, 80, 96)        %k = getitem(%p, 1) ..

A fused weight is sharded by the segments of the split behind it; a slice alone does not say what
the rest of the dim is. Only where the slices are all that reads the value, and tile the dim.

Numerics: kept bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.ops.linear import LINEAR
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.ir.walks import num_reads
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    calls,
    named_arguments,
    replace,
    shape_of,
)

_DEFAULTS = {"dim": 0, "start": None, "end": None, "step": 1}


@dataclass(frozen=True)
class SplitSlices(GraphPass):
    """One split for all slices of a projection."""

    name: ClassVar[str] = "split-slices"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Split every projection that slices tile; returns their number."""
        changes = 0
        for linear in calls(gm, LINEAR):
            source = _with_bias(linear)
            found = _tiles(source)
            if found is not None:
                _split(gm, source, *found)
                changes += 1
        return changes


def _with_bias(linear: fx.Node) -> fx.Node:
    """The sum of a linear and its bias, where normalization has taken them apart."""
    if num_reads(linear) == 1:
        (user,) = linear.users
        if user.target is aten.add.Tensor and shape_of(user) == shape_of(linear):
            return user
    return linear


def _tiles(source: fx.Node) -> tuple[int, list[fx.Node]] | None:
    """The dim that all readers of a value slice, and the slices in its order, if they tile it."""
    found: list[tuple[int, int, int, fx.Node]] = []
    for user in source.users:
        if user.target is not aten.slice.Tensor or user.args[0] is not source:
            return None
        named = named_arguments(user, _DEFAULTS)
        if named["step"] != 1:
            return None
        dim = named["dim"] % len(shape_of(source))
        start, end, _ = slice(named["start"], named["end"]).indices(shape_of(source)[dim])
        found.append((dim, start, end, user))
    found.sort(key=lambda entry: entry[:3])
    dims = {dim for dim, *_ in found}
    if len(dims) != 1 or len(found) < 2:
        return None
    (dim,) = dims
    edges = [0, *(end for _, _, end, _ in found)]
    starts = [start for _, start, _, _ in found]
    if starts != edges[:-1] or edges[-1] != shape_of(source)[dim]:
        return None
    return dim, [node for *_, node in found]


def _split(gm: fx.GraphModule, source: fx.Node, dim: int, slices: list[fx.Node]) -> None:
    sizes = [shape_of(node)[dim] for node in slices]
    first = next(node for node in gm.graph.nodes if node in set(slices))
    emit = Emitter(gm, first)
    parts = emit(aten.split_with_sizes.default, source, sizes, dim)
    items = [
        emit(operator.getitem, parts, index, shape=shape_of(node), like=source)
        for index, node in enumerate(slices)
    ]
    for node, item in zip(slices, items, strict=True):
        replace(node, item)
