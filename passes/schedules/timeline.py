"""What an order of steps takes: when each step runs, the bubble, and the activations held.

Pure functions of orders and costs: `orders[stage]` is the list of a stage's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msc.ir.errors import PlanError
from msc.passes.schedules.stages import Stages, Step

Orders = Sequence[Sequence[Step]]


@dataclass(frozen=True)
class Costs:
    """Times of a chunk's steps for one micro-batch, by chunk, and of a transfer between stages.

    weight: of a split backward, whose input gradients are `backward`.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def equal(cls, num_chunks: int, split: bool) -> Costs:
        """A forward takes 1, a backward 2, which splits evenly; transfers take no time."""
        one = (1.0,) * num_chunks
        return cls(one, one if split else (2.0,) * num_chunks, one)

    def of(self, step: Step) -> float:
        """The time that a step takes."""
        times: tuple[float, ...] = getattr(self, step.kind)
        return times[step.chunk]


def needs(step: Step, num_chunks: int) -> list[Step]:
    """The steps whose results a step reads."""
    before: list[Step] = []
    if step.kind == "forward":
        if step.chunk:
            before.append(Step("forward", step.micro_batch, step.chunk - 1))
    elif step.kind == "weight":
        before.append(Step("backward", step.micro_batch, step.chunk))
    else:
        before.append(Step("forward", step.micro_batch, step.chunk))
        if step.chunk + 1 < num_chunks:
            before.append(Step("backward", step.micro_batch, step.chunk + 1))
    return before


def start_times(orders: Orders, stages: Stages, costs: Costs) -> dict[Step, float]:
    """When each step starts if every stage keeps to its order, by time; starts with the first.

    Raises `PlanError` if the orders wait for each other in a ring.
    """
    starts: dict[Step, float] = {}
    ends: dict[Step, float] = {}
    position = [0] * stages.count
    free = [0.0] * stages.count
    pending = list(range(stages.count))
    while pending:
        stage = pending.pop()
        while position[stage] < len(orders[stage]):
            step = orders[stage][position[stage]]
            before = needs(step, stages.num_chunks)
            if any(each not in ends for each in before):
                break
            arrivals = [
                ends[each] + (costs.transfer if stages.of(each.chunk) != stage else 0.0)
                for each in before
            ]
            starts[step] = max([free[stage], *arrivals])
            ends[step] = free[stage] = starts[step] + costs.of(step)
            position[stage] += 1
            pending += [s for s in stages.beside(step.chunk) if s != stage and s not in pending]
    stuck = [s for s in range(stages.count) if position[s] < len(orders[s])]
    if stuck:
        waiting = ", ".join(f"stage {s} at {orders[s][position[s]]}" for s in stuck)
        raise PlanError(f"The schedule's orders wait for each other: {waiting}.")
    return dict(sorted(starts.items(), key=lambda item: item[1]))


def makespan(orders: Orders, stages: Stages, costs: Costs) -> float:
    """The time from the first step to the end of the last one of all stages."""
    starts = start_times(orders, stages, costs)
    return max((start + costs.of(step) for step, start in starts.items()), default=0.0)


def bubble_fraction(orders: Orders, stages: Stages, costs: Costs) -> float:
    """Idle time over the work of the busiest stage: (p - 1) / (v m) of interleaved 1F1B."""
    work = max(sum(map(costs.of, order)) for order in orders)
    return makespan(orders, stages, costs) / work - 1 if work else 0.0


def peak_held(order: Sequence[Step], sizes: Sequence[float] | None = None) -> float:
    """The most activations that a stage holds at once.

    sizes: of what a chunk keeps of one micro-batch; without it, pairs of micro-batch and chunk.
    """
    last = "weight" if any(step.kind == "weight" for step in order) else "backward"
    held = most = 0.0
    for step in order:
        size = 1.0 if sizes is None else sizes[step.chunk]
        held += size * ((step.kind == "forward") - (step.kind == last))
        most = max(most, held)
    return most
