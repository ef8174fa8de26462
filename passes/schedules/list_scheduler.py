"""From rules and costs to an order on every stage: list scheduling.

At any time a stage that is free starts the first step that its rules let start: a forward, else a
backward, else a weight gradient. Micro-batches pass each chunk in their order.

Whatever the costs, no rules can bring this to a standstill that hold, for each stage, at least as
many pairs as it has chunks. Take the first unfinished micro-batch and the next step of it. Before
it, nothing has passed that chunk, nor any after it. If the step is a forward of a stage's j-th
chunk, then only chunks before the j-th have anything in flight there; and each of those left j
places free when it was let in. Backwards and weight gradients are never held back. In order, a
stage of v chunks must hold (v - 1) g + 1 pairs, g being the largest group: then the same follows
from comparing with the order that finishes one group after the other, which holds no more.
"""

from __future__ import annotations

import heapq

from msc.ir.errors import PlanError
from msc.passes.schedules.rules import Rules
from msc.passes.schedules.stages import Kind, Step
from msc.passes.schedules.timeline import Costs, Orders, needs

_Choice = tuple[float, tuple[int, int, int, int], Step]


def list_schedule(rules: Rules, costs: Costs) -> Orders:
    """The order of the steps of each stage. Deterministic: stages take turns by their number."""
    return _Scheduler(rules, costs).run()


class _Scheduler:
    def __init__(self, rules: Rules, costs: Costs) -> None:
        self.rules = rules
        self.costs = costs
        self.stages = rules.stages
        self.kinds: tuple[Kind, ...] = ("forward", "backward")
        if rules.split:
            self.kinds = ("forward", "backward", "weight")
        chunks = rules.stages.num_chunks
        self.next = {kind: [0] * chunks for kind in self.kinds}
        self.chunks = [rules.stages.chunks(stage) for stage in range(rules.stages.count)]
        self.free = [0.0] * rules.stages.count
        self.ends: dict[Step, float] = {}
        self.orders: list[list[Step]] = [[] for _ in self.free]

    def run(self) -> Orders:
        choices: list[_Choice | None] = [self._choose(stage) for stage in range(self.stages.count)]
        queue = [(choice[0], stage) for stage, choice in enumerate(choices) if choice]
        heapq.heapify(queue)
        while queue:
            time, stage = heapq.heappop(queue)
            choice = choices[stage]
            if choice is None or choice[0] != time:
                continue  # it has chosen again since
            step = choice[2]
            self._take(stage, step, time)
            for other in sorted({stage, *self.stages.beside(step.chunk)}):
                choices[other] = new = self._choose(other)
                if new is not None:
                    heapq.heappush(queue, (new[0], other))
        total = self.rules.micro_batches * len(self.kinds)
        if any(len(o) < total * len(c) for o, c in zip(self.orders, self.chunks, strict=True)):
            raise PlanError(f"No order of steps keeps to these rules: {self.rules}.")
        return self.orders

    def _take(self, stage: int, step: Step, time: float) -> None:
        self.ends[step] = self.free[stage] = time + self.costs.of(step)
        self.orders[stage].append(step)
        self.next[step.kind][step.chunk] += 1

    def _choose(self, stage: int) -> _Choice | None:
        """What a stage does next, and when it can start."""
        found: list[_Choice] = []
        for kind in self.kinds:
            heads = [
                (self._preference(kind, place, step), place, step)
                for place, chunk in enumerate(self.chunks[stage])
                if (step := self._head(kind, chunk)) is not None
            ]
            if self.rules.in_order:
                heads = heads and [min(heads)]
            for preference, place, step in heads:
                if kind == "forward" and not self._may_hold(stage, place, step.chunk):
                    continue
                ready = self._ready(stage, step)
                if ready is not None:
                    found.append((max(ready, self.free[stage]), preference, step))
        return min(found, key=lambda choice: choice[:2], default=None)

    def _head(self, kind: Kind, chunk: int) -> Step | None:
        number = self.next[kind][chunk]
        return Step(kind, number, chunk) if number < self.rules.micro_batches else None

    def _preference(self, kind: Kind, place: int, step: Step) -> tuple[int, int, int, int]:
        group = self.rules.group(step.micro_batch)
        turn = place if kind == "forward" else -place
        return self.kinds.index(kind), group, turn, step.micro_batch

    def _may_hold(self, stage: int, place: int, chunk: int) -> bool:
        """Whether a stage may run one more forward on a chunk, its `place`-th one."""
        last = self.kinds[-1]
        chunks = self.chunks[stage]
        forwards = sum(self.next["forward"][c] for c in chunks)
        held = forwards - sum(self.next[last][c] for c in chunks)
        in_flight = forwards - sum(self.next["backward"][c] for c in chunks)
        limit = self.rules.held[stage]
        after = 0 if self.rules.in_order else len(chunks) - 1 - place  # places kept for later ones
        own = self.next["forward"][chunk] - self.next["backward"][chunk]
        return held < limit and in_flight < limit - after and own < self.rules.in_flight[chunk]

    def _ready(self, stage: int, step: Step) -> float | None:
        """When all that a step reads is there; None if that is not known yet."""
        time = 0.0
        for each in needs(step, self.stages.num_chunks):
            end = self.ends.get(each)
            if end is None:
                return None
            away = self.stages.of(each.chunk) != stage
            time = max(time, end + (self.costs.transfer if away else 0.0))
        return time
