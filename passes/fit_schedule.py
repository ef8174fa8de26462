"""Schedule "auto": the first of its choices to end whose rank graphs keep the bound on memory.

`choose-schedule` estimates what a schedule needs from what blocks save, and when it ends from what
their calls cost. Here the rank graphs of a choice are made, their memory is predicted, and on a
cluster their step is simulated: of the choice that fits by the estimate, then of those that could
be better. Without `memory=` the bound is what 1F1B needs, predicted as well. Where no choice keeps
the bound, the one that needs least stays.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import ClassVar

from msc.ir.errors import PlanError
from msc.ir.passes import BIT_EXACT, Pass, UnitPass
from msc.ir.recompute import MemoryBudget
from msc.passes.choose_schedule import described, usual_schedule
from msc.passes.compilation import Compilation
from msc.passes.schedules.rules import AUTO
from msc.passes.schedules.schedule import Schedule
from msc.passes.trial import Blocks, copied, peaks, trial_of_blocks

_TRIALS = 12
_LOOKED_AT = 60
"""Choices that it looks at, most of which are of no use."""
_LESS = 0.999
"""What ends sooner by less than that is alike."""
_MORE = 1.1
"""What ends later by more than that, by the modelled costs, is not simulated."""


@dataclass(frozen=True)
class FitSchedule(UnitPass):
    """Changes no graph.

    then: the passes that make rank graphs of blocks, to predict their memory.
    """

    then: tuple[Pass, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "fit-schedule"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        settings = unit.settings
        if settings.schedule != AUTO or settings.measure is None:
            return 0
        if isinstance(settings.recompute, MemoryBudget):
            return 0  # what is saved is chosen afterwards
        search = _Search(unit, self.then)
        first = unit.schedule
        if settings.memory is not None:
            unit.schedule = search.best(first, settings.memory)
        elif first.stages.count > 1:  # else all choices are one
            unit.schedule = search.best(first, search.measure(usual_schedule(unit)))
        unit.remark(*map(str, search.tried))
        if unit.schedule is not first:
            unit.remark(*described(unit.schedule))
        return 0


@dataclass(frozen=True)
class _Choice:
    """A schedule that was tried; ends: in seconds on a cluster, else by the modelled costs."""

    schedule: Schedule
    needed: int
    ends: float

    def __str__(self) -> str:
        name, virtual = self.schedule.name, self.schedule.stages.virtual
        return f"'{name}' of {virtual} needs {self.needed:,} bytes and ends at {self.ends:.4g}"


class _Search:
    """Tries choices, as many as it may."""

    def __init__(self, unit: Compilation, then: tuple[Pass, ...]) -> None:
        self._unit = unit
        self._then = then
        self._clock = unit.settings.step_seconds
        self.tried: list[_Choice] = []

    def best(self, first: Schedule, bound: float) -> Schedule:
        """The one that ends first of those within `bound`; if there is none, what needs least."""
        choices = itertools.chain([first], self._unit.schedules)
        for schedule in itertools.islice(choices, _LOOKED_AT):
            if len(self.tried) == _TRIALS:
                break
            if not self._is_of_use(schedule, bound):
                continue
            with contextlib.suppress(PlanError):  # it cannot have what else was asked for
                self.measure(schedule)
        fits = [each for each in self.tried if each.needed <= bound]
        if fits:
            return min(fits, key=lambda each: each.ends).schedule
        return min(self.tried, key=lambda each: each.needed).schedule if self.tried else first

    def _is_of_use(self, schedule: Schedule, bound: float) -> bool:
        """Whether it could be better than what was tried.

        By the modelled costs it has to end sooner than one that fits. Where steps are simulated,
        what overlaps counts as well: there sooner than one of its own kind, and not much later
        than any.
        """
        if any(each.schedule.orders == schedule.orders for each in self.tried):
            return False
        fits = [each.schedule for each in self.tried if each.needed <= bound]
        if self._clock is None:
            return all(schedule.ends < _LESS * each.ends for each in fits)
        alike = [each for each in fits if _kind(each) == _kind(schedule)]
        return all(schedule.ends < _LESS * each.ends for each in alike) and all(
            schedule.ends < _MORE * each.ends for each in fits
        )

    def measure(self, schedule: Schedule) -> float:
        """The predicted bytes of the fullest rank."""
        unit, settings = self._unit, self._unit.settings
        before, unit.schedule = unit.schedule, schedule
        try:
            tried = trial_of_blocks(unit, _blocks(unit))
            needed = max(peaks(tried, self._then))
        finally:
            unit.schedule = before
        ends = schedule.ends
        if self._clock is not None:
            ends = self._clock(settings.mesh, tried.tp_bounds, tried.rank_graphs)
        self.tried.append(_Choice(schedule, needed, ends))
        return needed


def _kind(schedule: Schedule) -> str:
    """Its name, whatever is in flight."""
    return schedule.name.split()[0]


def _blocks(unit: Compilation) -> list[Blocks]:
    """Those of each variant, on the stages of the schedule."""
    return [
        {
            (stage, name): copied(variant.programs(stage, name))
            for stage in range(unit.schedule.stages.count)
            for name in sorted(set(unit.blocks_on(stage)))
        }
        for variant in unit.variants
    ]
