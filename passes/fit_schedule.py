"""Schedule "auto" under a bound on memory: the first of its choices whose rank graphs keep it.

`choose-schedule` estimates what a schedule needs from what blocks save. Here the rank graphs of a
choice are made and their memory is predicted, and where it is too much the next choices are tried,
in the order in which they end. Where none of them keeps the bound, the one that needs least stays.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

from msc.ir.errors import PlanError
from msc.ir.passes import BIT_EXACT, Pass, UnitPass
from msc.ir.recompute import MemoryBudget
from msc.passes.choose_schedule import described
from msc.passes.compilation import Compilation
from msc.passes.schedules.rules import AUTO
from msc.passes.schedules.schedule import Schedule
from msc.passes.trial import Blocks, copied, peaks, trial_of_blocks

_TRIALS = 10


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
        bound = settings.memory
        if settings.schedule != AUTO or bound is None or settings.measure is None:
            return 0
        if isinstance(settings.recompute, MemoryBudget):
            return 0  # what is saved is chosen afterwards
        first = unit.schedule
        tried: list[tuple[int, int, Schedule]] = []
        for schedule in itertools.islice(itertools.chain([first], unit.schedules), _TRIALS):
            unit.schedule = schedule
            try:
                needed = max(peaks(trial_of_blocks(unit, _blocks(unit)), self.then))
            except PlanError:  # this schedule cannot have what else was asked for
                continue
            tried.append((needed, len(tried), schedule))
            if needed <= bound:
                break
        needed, _, unit.schedule = min(tried, default=(0, 0, first))
        if unit.schedule is not first:
            unit.remark(f"'{first.name}' needs more than {bound:,.0f} bytes per rank")
            unit.remark(*described(unit.schedule))
        return 0


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
