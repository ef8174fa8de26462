"""Which rank of a run stands still: from how far the ranks' rings say that they are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msc.runtime.diagnosis.blame import (
    BUSY,
    DATA,
    DEAD,
    MISMATCH,
    RING,
    SAVING,
    SILENT,
    STUCK,
    Cause,
    blame,
)
from msc.runtime.diagnosis.ring import RankView, view_from_data
from msc.runtime.diagnosis.schedule import from_text

STILL_S = 2.5
"""How long no rank may get on before the rings are read: the least such time."""
TIMES = 6.0
"""How many of the slowest of the last steps that time is, if it is more."""
FIRST_STEPS_S = 120.0
"""The same while too few steps of a generation were taken to say: kernels may be compiled yet."""
WITHOUT_DATA_S = 60.0
"""The same where a rank waits for its data or for storage, which may just be slow."""
_LOOK_S = 0.5
"""Between two readings of the rings."""
_STEPS = 8
_GUILTY = (DEAD, BUSY, MISMATCH)
"""What is said of a rank that must be replaced; who is frozen the agent sees by itself."""
_SLOW = (DATA, SAVING)
_TOGETHER = (RING, STUCK, SILENT)


@dataclass
class Pulse:
    """How far one rank was last, and when that was heard."""

    step: int
    changed: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Standstill:
    """Nobody gets on: for how long, which ranks are the cause, and what is said of them.

    guilty: ranks that must be replaced; without any, all must meet again; views: their rings.
    """

    seconds: float
    guilty: tuple[Cause, ...]
    text: str
    views: Mapping[int, RankView]


class Health:
    """Watches the ranks of one generation while they are inside of `fit`."""

    def __init__(self) -> None:
        self._pulses: dict[int, Pulse] = {}
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last_step = time.monotonic()
        self._first: int | None = None  # nobody has said where the generation begins
        self._next_look = 0.0

    def begin(self, step: int) -> None:
        """A generation begins after `step`: its first steps may take any time."""
        self._steps.clear()
        self._last_step = time.monotonic()
        self._first = step + 1
        for pulse in self._pulses.values():
            pulse.step, pulse.changed = step + 1, self._last_step

    def hear(self, steps: Mapping[int, int]) -> None:
        """These ranks have got on, and are in these steps."""
        now = time.monotonic()
        for rank, step in steps.items():
            pulse = self._pulses.setdefault(rank, Pulse(self._first or step))
            pulse.changed = now
            done = step - pulse.step
            if done > 0 and pulse is next(iter(self._pulses.values())):
                self._steps += [(now - self._last_step) / done] * min(done, _STEPS)
                self._last_step = now
            pulse.step = step

    @property
    def patience_s(self) -> float:
        """How long nobody may get on."""
        if len(self._steps) < 2:
            return FIRST_STEPS_S
        return max(STILL_S, TIMES * max(self._steps))

    def step_of(self, ranks: Iterable[int]) -> int | None:
        """The last step that one of these ranks was known to be in."""
        return max(
            (self._pulses[rank].step for rank in ranks if rank in self._pulses), default=None
        )

    def slow_step_s(self) -> float:
        """How long one of the last steps took at most."""
        return max(self._steps, default=0.0)

    def wants_rings(self) -> bool:
        """Whether nobody gets on, so that all rings must be read."""
        now = time.monotonic()
        if not self._pulses or now < self._next_look or self._still(now) < STILL_S:
            return False
        self._next_look = now + _LOOK_S
        return True

    def judge(self, rings: Iterable[Mapping[str, Any]], world: int) -> Standstill | None:
        """Why nobody gets on, by the rings of all ranks (see `Rings.all`).

        None if ranks do meanwhile, or wait for what is no fault. A rank that runs another program
        is no slow one, so it is found in the first steps too.
        """
        if not self._pulses:  # what comes late is of ranks that there are no more
            return None
        still = self._still(time.monotonic())
        if still < STILL_S:
            return None
        causes, views = _causes(rings, world)
        if still < self.patience_s and not any(cause.what == MISMATCH for cause in causes):
            return None
        kinds = _GUILTY if still < WITHOUT_DATA_S else _GUILTY + _SLOW
        guilty = tuple(cause for cause in causes if cause.what in kinds)
        text = "; ".join(f"rank {c.rank} {c.what}{_detail(c)}" for c in causes) or "nobody gets on"
        if guilty or any(cause.what in _TOGETHER for cause in causes):
            return Standstill(still, guilty, text, views)
        return None

    def mismatches(
        self, rings: Iterable[Mapping[str, Any]], world: int
    ) -> list[tuple[Cause, RankView | None]]:
        """The ranks that have done something else than their programs, whatever came of it."""
        causes, views = _causes(rings, world)
        return [(each, views.get(each.rank)) for each in causes if each.what == MISMATCH]

    def _still(self, now: float) -> float:
        return now - max(pulse.changed for pulse in self._pulses.values())


def _causes(
    rings: Iterable[Mapping[str, Any]], world: int
) -> tuple[Sequence[Cause], dict[int, RankView]]:
    found = list(rings)
    views = {each["rank"]: view_from_data(each["view"]) for each in found if each["view"]}
    schedules = {each["rank"]: from_text(each["schedule"]) for each in found}
    return blame(views, schedules, world).causes, views


def _detail(cause: Cause) -> str:
    return f" ({cause.detail})" if cause.detail else ""
