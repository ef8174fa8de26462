"""Remove calls whose result nobody reads.

    %cos: f32[8,4] = aten.cos(%x)  # no reader      ->   (nothing)

Placeholders stay: an unused parameter is a parameter. Calls that write to an operand stay too.

Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, GraphPass
from msc.ir.torch_private import OpOverload, is_mutable


def remove_dead_code(gm: fx.GraphModule) -> int:
    """Remove every call without a reader; returns their number."""
    removed = 0
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and not _writes(node):
            gm.graph.erase_node(node)
            removed += 1
    return removed


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_mutable(node.target)


@dataclass(frozen=True)
class RemoveDeadCode(GraphPass):
    """`remove_dead_code` as a pass."""

    name: ClassVar[str] = "remove-dead-code"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Remove every call without a reader."""
        return remove_dead_code(gm)
