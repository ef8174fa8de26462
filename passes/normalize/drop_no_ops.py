"""Remove calls that change nothing, and give conversions one form.

    %contiguous: f32[8,4] = aten.contiguous(%x)         ->  %x
    %dropout: f32[8,4] = aten.dropout(%x, 0.1, False)   ->  %x
    %cat: f32[8,4] = aten.cat([%empty, %x], -1)         ->  %x
    %_to_copy: f16[8,4] = aten._to_copy(%x, dtype=f16)  ->  %to: f16[8,4] = aten.to.dtype(%x, f16)

Copies and layouts do not matter in a graph without in-place ops. A `detach` stays where its operand
has a gradient.

Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    named_arguments,
    needing_grad,
    replace,
    shape_of,
)

_COPIES = {
    aten.contiguous.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.lift.default,
}
_CONVERSIONS = {
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
}
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.flatten.using_ints,
}
_DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}


def drop_no_ops(gm: fx.GraphModule) -> int:
    """Remove calls that change nothing; returns the number of calls removed or given one form."""
    changes = 0
    grads = needing_grad(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        source = _only_part(node) if node.target is aten.cat.default else node.args[0]
        if not isinstance(source, fx.Node):
            continue
        if node.target in _CONVERSIONS:
            changes += _convert(gm, node, source)
        elif _changes_nothing(node, source, grads):
            replace(node, source)
            changes += 1
    return changes


def _convert(gm: fx.GraphModule, node: fx.Node, source: fx.Node) -> int:
    dtype = node.meta["val"].dtype
    if dtype == source.meta["val"].dtype:
        replace(node, source)
        return 1
    if node.target is aten.to.dtype and node.args == (source, dtype) and not node.kwargs:
        return 0
    emit = Emitter(gm, node)
    new = emit(aten.to.dtype, source, dtype, shape=shape_of(node), like=node)
    replace(node, new)
    return 1


def _only_part(node: fx.Node) -> fx.Node | None:
    """The one operand of a `cat` that has elements, such as a key appended to an empty cache."""
    parts: Any = node.args[0]
    filled = [part for part in parts if part.meta["val"].numel()]
    same = len(filled) == 1 and shape_of(filled[0]) == shape_of(node)
    same = same and filled[0].meta["val"].dtype == node.meta["val"].dtype
    return filled[0] if same else None


def _changes_nothing(node: fx.Node, source: fx.Node, grads: set[fx.Node]) -> bool:
    if node.target in _COPIES or node.target is aten.cat.default:
        return True
    if node.target in _RESHAPES:
        # A slice of all of a dim, or a view with the shape it had.
        return shape_of(node) == shape_of(source)
    if node.target in _DROPOUTS:
        arguments = named_arguments(node, {})
        return not arguments["train"] or arguments["p"] == 0.0
    return node.target is aten.detach.default and source not in grads


@dataclass(frozen=True)
class DropNoOps(GraphPass):
    """`drop_no_ops` as a pass."""

    name: ClassVar[str] = "drop-no-ops"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Remove calls that change nothing."""
        return drop_no_ops(gm)
