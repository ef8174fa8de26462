"""Remove calls whose result nobody reads.

    %cos: f32[8,4] = aten.cos(%x)  # no reader      ->   (nothing)

Placeholders stay: an unused parameter is a parameter. Calls that write to an operand stay too, until
`functionalize` has replaced them.

Numerics: kept bit for bit.
"""

from __future__ import annotations

from torch import fx

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
