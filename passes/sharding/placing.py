"""Everything that the search over tp starts from, so that it can be asked again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from msc.cost import CostModel
from msc.ir.placement import State
from msc.ir.structure import Structure, placeholders
from msc.passes.sharding.axes import Axis
from msc.passes.sharding.candidates import Candidates
from msc.passes.sharding.rule import Strategy
from msc.passes.sharding.search import Placed, Step, priced, search


@dataclass(frozen=True)
class Placing:
    """A cut model, its candidates over one axis, and what they cost; `solve` chooses among them."""

    structure: Structure
    candidates: Candidates
    axis: Axis
    cost: CostModel
    step: Step

    @property
    def model(self) -> CostModel:
        """The cost model by which the search compares."""
        return priced(self.cost, self.structure, self.step)

    def solve(self) -> Placed:
        """The cheapest placement; `PlanError` if there is none."""
        return search(self.structure, self.candidates, self.axis, self.cost, self.step)

    def restricted(self, allowed: Mapping[fx.Node, frozenset[State]]) -> Placing:
        """The same with only these states of some placeholders, in place of earlier limits."""
        merged = {**self.candidates.allowed, **allowed}
        return replace(self, candidates=replace(self.candidates, allowed=merged))

    def forced(self, node: fx.Node, strategy: Strategy) -> Placing:
        """The same where one call runs by `strategy`."""
        strategies = {**self.candidates.strategies, node: [strategy]}
        return replace(self, candidates=replace(self.candidates, strategies=strategies))

    def parameters(self) -> dict[str, list[fx.Node]]:
        """The placeholders of every parameter that a block reads, in all distinct blocks."""
        found: dict[str, dict[fx.Node, None]] = {}
        for instance in self.structure.instances:
            nodes = placeholders(self.structure.blocks[instance.block])
            for node, source in zip(nodes, instance.sources, strict=True):
                if source.kind == "parameter":
                    found.setdefault(source.name, {})[node] = None
        return {name: list(nodes) for name, nodes in found.items()}
