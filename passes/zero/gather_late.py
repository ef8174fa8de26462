"""Wait for each block's parameters where the first micro-batch comes to the block.

    %w1 = unflatten_shards(wait(%a1), ..)        %w1 = unflatten_shards(wait(%a1), ..)
    %w2 = unflatten_shards(wait(%a2), ..)        %y1 = block1_forward(%w1, %x)         # layers.0
    %y = chunk0_forward(%w1, %w2, %x)       ->   %w2 = unflatten_shards(wait(%a2), ..)
                                                 %y2 = block1_forward_1(%w2, %y1)      # layers.1

The first forward of each chunk is opened up to its blocks, so that a block computes while the
parameters of later ones are on their way. Numerics: kept bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir import actions
from msc.ir.communication import is_communication, subgraph
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.open_call import open_call


@dataclass(frozen=True)
class GatherLate(GraphPass):
    """Open the first forwards; wait for each bucket of parameters before its first reader."""

    name: ClassVar[str] = "gather-late"
    numerics: ClassVar[str] = BIT_EXACT

    def applies_to(self, name: str) -> bool:
        """Rank graphs."""
        return name.startswith("rank.")

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        gathered = gm.graph.find_nodes(op="call_function", target=actions.unflatten_shards)
        calls = _first_readers(gm, gathered)
        for call in calls:
            open_call(gm, call)
        if calls:
            gm.graph.eliminate_dead_code(_stays)
            for split in gathered:
                _sink(gm, split)
        return len(calls)


def _stays(node: fx.Node) -> bool:
    """Whether a node must run though nobody reads it."""
    return node.op in ("placeholder", "output") or is_communication(node)


def _first_readers(gm: fx.GraphModule, gathered: list[fx.Node]) -> list[fx.Node]:
    """The first call of each graph that reads gathered parameters of several blocks.

    Not of one that writes buffers: an evaluation looks for these in the results of the call.
    """
    reads: dict[fx.Node, set[fx.Node]] = {}
    for split in gathered:
        for item in split.users:
            for user in item.users:
                reads.setdefault(user, set()).add(split)
    found: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module" and node in reads:
            found.setdefault(node.target, node)
    return [
        call
        for call in found.values()
        if str(call.target).endswith("_forward")
        and len(reads[call]) > 1
        and len(subgraph(gm, call).graph.output_node().args[0]) == 3  # type: ignore[arg-type]
    ]


def _sink(gm: fx.GraphModule, split: fx.Node) -> None:
    """Move a wait and what takes its result apart to the first reader of a part."""
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    items = [user for user in split.users if user.target is operator.getitem]
    readers = [user for item in items for user in item.users]
    if readers:
        first = min(readers, key=order.__getitem__)
        for node in (split.args[0], split, *items):
            assert isinstance(node, fx.Node)
            first.prepend(node)
