"""Overlap: let a block's collectives run while the block computes what does not wait for them.

    %dx = msc.linear_dgrad(%gy, %w)              %dx = msc.linear_dgrad(%gy, %w)
    %dw = msc.linear_wgrad(%gy, %x)        ->    %rs = c10d.reduce_scatter_tensor(%dx, ..)
    %rs = c10d.reduce_scatter_tensor(%dx, ..)    %dw = msc.linear_wgrad(%gy, %x)
    %y  = c10d.wait_tensor(%rs)                  %y  = c10d.wait_tensor(%rs)

Each collective starts as soon as its operands are there; what it does not need comes later, as much
of it as the collective takes by the cost model, the rest after it. Collectives keep their order.
Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from msc.ir.communication import COLLECTIVES, WAITS, is_communication
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.ir.walks import ancestors
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Compilation, Settings


@dataclass(frozen=True)
class Overlap(GraphPass):
    """Reorder every block's forward and backward."""

    name: ClassVar[str] = "overlap"
    numerics: ClassVar[str] = BIT_EXACT

    def applies_to(self, name: str) -> bool:
        """The blocks' graphs, once they are differentiated."""
        return name.startswith("block")

    def run(self, gm: fx.GraphModule, unit: Compilation) -> int:
        return reorder(gm, unit.settings)


def reorder(gm: fx.GraphModule, settings: Settings) -> int:
    """Put the calls of a graph in the order that hides most; return how many have moved."""
    before = [node for node in gm.graph.nodes if node.op == "call_function"]
    if not any(node.target in COLLECTIVES for node in before):
        return 0
    after = overlapped(before, settings)
    for node in after:
        gm.graph.output_node().prepend(node)
    return sum(one is not other for one, other in zip(before, after, strict=True))


def overlapped(calls: list[fx.Node], settings: Settings) -> list[fx.Node]:
    """The calls of a graph in the order that the pass gives them."""
    return _Scheduler(calls, settings).run()


class _Scheduler:
    """Puts the calls of a graph in a new order."""

    def __init__(self, nodes: list[fx.Node], settings: Settings) -> None:
        self.nodes = nodes
        self.settings = settings
        self.position = {node: index for index, node in enumerate(nodes)}
        self.left = dict.fromkeys(nodes)  # not placed yet, in the old order
        self.order: list[fx.Node] = []

    def run(self) -> list[fx.Node]:
        for node in self.nodes:
            if is_communication(node) and node.target not in WAITS:
                self._place(node)
        for node in self.nodes:
            self._place(node)
        return self.order

    def _place(self, node: fx.Node) -> None:
        """Place a node after all that it needs and that is still left, in the old order."""
        needed = ancestors([node], self.left.__contains__)
        for each in sorted(needed, key=self.position.__getitem__):
            if each.target in WAITS:
                self._hide(each, needed)
            self._append(each)

    def _append(self, node: fx.Node) -> None:
        del self.left[node]
        self.order.append(node)

    def _hide(self, wait: fx.Node, urgent: set[fx.Node]) -> None:
        """Before a wait, place work that is ready until it takes as long as the collective."""
        open_time = call_cost(wait.all_input_nodes[0], self.settings)
        for node in list(self.left):
            if open_time <= 0:
                return
            if node in urgent or is_communication(node):
                continue
            if all(operand not in self.left for operand in node.all_input_nodes):
                self._append(node)
                open_time -= call_cost(node, self.settings)
