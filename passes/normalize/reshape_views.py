"""Turn views into reshapes.

    %v: f32[32,8] = aten.view(%x, [-1, 8])    ->   %v: f32[32,8] = aten.reshape(%x, [32, 8])

A view needs strides that the results of other kernels, or of a shard, may not have. Sizes are
written out, so that whoever makes them local finds every one.

Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.normalize.rewrite import aten, shape_of

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
}


def reshape_views(gm: fx.GraphModule) -> int:
    """Turn every view into a reshape to plain sizes; returns the number of calls changed."""
    changed = 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS:
            args = (node.args[0], list(shape_of(node)))
            if node.target is not aten.reshape.default or node.args != args:
                node.target = aten.reshape.default
                node.args = args
                node.kwargs = {}
                changed += 1
    return changed


@dataclass(frozen=True)
class ReshapeViews(GraphPass):
    """`reshape_views` as a pass."""

    name: ClassVar[str] = "reshape-views"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Turn every view into a reshape."""
        return reshape_views(gm)
