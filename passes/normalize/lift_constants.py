"""Make a number that is added to a scalar a tensor of its own, or drop it if it is zero.

    %y: f32[] = aten.add.Tensor(%x, 0.5)    ->    %c: f32[] = aten.full([], 0.5)
                                                  %y: f32[] = aten.add.Tensor(%x, %c)
    %z: f32[] = aten.add.Tensor(%x, 0)      ->    %x

A loss that is a sum over ranks and micro-batches can share a tensor among them, but not a number
inside a call: each would add all of it. `sum(losses)` starts with such a zero.

Numerics: kept bit for bit, but for the sign of a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.passes import GraphPass
from msc.passes.normalize.rewrite import Emitter, aten, replace, shape_of

_SUMS = {
    aten.add.Tensor: aten.add.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
}


def lift_constants(gm: fx.GraphModule) -> int:
    """Lift numbers out of sums of scalars; returns the number of calls changed."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _SUMS or shape_of(node):
            continue
        if len(node.args) != 2 or node.kwargs:
            continue  # with alpha the number has a factor
        source, number = node.args
        if not isinstance(source, fx.Node) or not isinstance(number, (int, float)):
            continue
        same = source.meta["val"].dtype == node.meta["val"].dtype
        if number == 0 and same and node.target is not aten.rsub.Scalar:
            replace(node, source)
        elif same and node.meta["val"].is_floating_point():
            emit = Emitter(gm, node)
            dtype = node.meta["val"].dtype
            constant = emit(aten.full.default, [], float(number), dtype=dtype)
            new = emit(_SUMS[node.target], source, constant, shape=())
            replace(node, new)
        else:
            continue
        changed += 1
    return changed


@dataclass(frozen=True)
class LiftConstants(GraphPass):
    """`lift_constants` as a pass."""

    name: ClassVar[str] = "lift-constants"
    numerics: ClassVar[str] = "kept bit for bit, but for the sign of a zero"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Lift numbers out of sums of scalars."""
        return lift_constants(gm)
