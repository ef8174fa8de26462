"""Make tensors that take nothing but size and dtype from another one independent of it.

    %z: f32[] = aten.new_zeros(%x, [])      ->    %z: f32[] = aten.full([], 0, dtype=float32)
    %o: f32[8,4] = aten.ones_like(%x)       ->    %o: f32[8,4] = aten.full([8, 4], 1, dtype=float32)

They read no value, so they combine no samples of the batch, whatever they are made like.

Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.normalize.rewrite import Emitter, aten, calls, named_arguments, replace, shape_of

_FILLS: dict[Any, Any] = {
    aten.new_zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_full.default: None,
    aten.full_like.default: None,
}
"""What an op fills its result with; None: its argument `fill_value`."""


def fill_constants(gm: fx.GraphModule) -> int:
    """Rewrite every such call; returns their number."""
    found = calls(gm, *_FILLS)
    for node in found:
        value = _FILLS[node.target]
        if value is None:
            value = named_arguments(node, {})["fill_value"]
        dtype = node.meta["val"].dtype
        emit = Emitter(gm, node)
        replace(node, emit(aten.full.default, list(shape_of(node)), value, dtype=dtype))
    return len(found)


@dataclass(frozen=True)
class FillConstants(GraphPass):
    """`fill_constants` as a pass."""

    name: ClassVar[str] = "fill-constants"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Rewrite every such call."""
        return fill_constants(gm)
