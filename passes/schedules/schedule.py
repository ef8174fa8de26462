"""The schedule of a compilation: which layers each chunk has, and the order of every stage."""

from __future__ import annotations

from dataclasses import dataclass

from msc.passes.schedules.list_scheduler import list_schedule
from msc.passes.schedules.rules import Rules
from msc.passes.schedules.stages import Stages
from msc.passes.schedules.timeline import Costs, Orders, makespan


@dataclass(frozen=True)
class Schedule:
    """Rules, and what they gave for the layers of a model.

    runs: of each chunk, the numbers of its block instances. planned: the costs by which the orders
    were made; modelled: what the chunks cost by the cost model.
    """

    name: str
    rules: Rules
    runs: list[list[int]]
    orders: Orders
    planned: Costs
    modelled: Costs

    @property
    def stages(self) -> Stages:
        """Where the chunks lie."""
        return self.rules.stages

    @property
    def ends(self) -> float:
        """When the last stage is done, at the modelled costs."""
        return makespan(self.orders, self.stages, self.modelled)

    @property
    def chunk_of(self) -> dict[int, int]:
        """The chunk of each block instance."""
        return {index: chunk for chunk, run in enumerate(self.runs) for index in run}


def scheduled(name: str, rules: Rules, runs: list[list[int]], modelled: Costs) -> Schedule:
    """A named schedule, whose orders are those of equal chunks."""
    planned = Costs.equal(rules.stages.num_chunks, rules.split)
    return Schedule(name, rules, runs, list_schedule(rules, planned), planned, modelled)
