"""Which rank of a run stands still: from how far the ranks' rings say that they are."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

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
from msc.runtime.diagnosis.ring import RankView, read_pulse, read_ring
from msc.runtime.diagnosis.schedule import Act, from_text

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
    """What one rank's ring has said last, and when it changed."""

    ring: Path
    schedule: Path
    said: bytes = b""
    step: int = 0
    changed: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Standstill:
    """Nobody gets on: for how long, which ranks are the cause, and what is said of them.

    guilty: ranks that must be replaced; without any, all must meet again.
    """

    seconds: float
    guilty: tuple[Cause, ...]
    text: str


class Health:
    """Watches the ranks of one generation while they are inside of `fit`."""

    def __init__(self) -> None:
        self._pulses: dict[int, Pulse] = {}
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last_step = time.monotonic()
        self._next_look = 0.0

    def watch(self, rank: int, ring: Path, schedule: Path) -> None:
        """A rank writes into this ring from now on."""
        self._pulses[rank] = Pulse(ring, schedule)

    def begin(self) -> None:
        """A generation begins: its first steps may take any time."""
        self._steps.clear()
        self._last_step = time.monotonic()
        for pulse in self._pulses.values():
            pulse.step, pulse.changed = 0, self._last_step

    def view(self, rank: int) -> RankView | None:
        """What a rank's ring says; None if it has none."""
        pulse = self._pulses.get(rank)
        try:
            return None if pulse is None else read_ring(pulse.ring)
        except (OSError, ValueError):
            return None

    def look(self) -> None:
        """See how far the ranks are."""
        now = time.monotonic()
        for pulse in self._pulses.values():
            found = read_pulse(pulse.ring)
            if found is None or found[0] == pulse.said:
                continue
            pulse.changed = now
            pulse.said, step = found
            if step > pulse.step and pulse is next(iter(self._pulses.values())):
                if pulse.step:  # else it is the first step, which warms up
                    self._steps.append((now - self._last_step) / (step - pulse.step))
                self._last_step = now
            pulse.step = step

    @property
    def patience_s(self) -> float:
        """How long nobody may get on."""
        if len(self._steps) < 2:
            return FIRST_STEPS_S
        return max(STILL_S, TIMES * max(self._steps))

    def slow_step_s(self) -> float:
        """How long one of the last steps took at most."""
        return max(self._steps, default=0.0)

    def standstill(self) -> Standstill | None:
        """Whether nobody gets on, and why; None if ranks do, or wait for what is no fault.

        A rank that runs another program is no slow one, so it is found in the first steps too.
        """
        now = time.monotonic()
        if not self._pulses or now < self._next_look:
            return None
        still = now - max(pulse.changed for pulse in self._pulses.values())
        if still < STILL_S:
            return None
        self._next_look = now + _LOOK_S
        causes = self._causes()
        self.look()
        if now - max(pulse.changed for pulse in self._pulses.values()) < still:
            return None  # one has gone on while the rings were read
        if still < self.patience_s and not any(cause.what == MISMATCH for cause in causes):
            return None
        kinds = _GUILTY if still < WITHOUT_DATA_S else _GUILTY + _SLOW
        guilty = tuple(cause for cause in causes if cause.what in kinds)
        text = "; ".join(f"rank {c.rank} {c.what}{_detail(c)}" for c in causes) or "nobody gets on"
        if guilty or any(cause.what in _TOGETHER for cause in causes):
            return Standstill(still, guilty, text)
        return None

    def mismatches(self) -> tuple[Cause, ...]:
        """The ranks that have done something else than their programs, whatever came of it.

        Read twice, as a rank that goes on may write what is being read.
        """
        before = self._causes()
        if not any(cause.what == MISMATCH for cause in before):
            return ()
        return tuple(c for c in self._causes() if c.what == MISMATCH and c in before)

    def _causes(self) -> tuple[Cause, ...]:
        views: dict[int, RankView] = {}
        schedules: dict[int, list[Act]] = {}
        for rank, pulse in self._pulses.items():
            view = self.view(rank)
            if view is not None:
                views[rank] = view
            schedules[rank] = from_text(pulse.schedule.read_text())
        return blame(views, schedules, len(self._pulses)).causes


def _detail(cause: Cause) -> str:
    return f" ({cause.detail})" if cause.detail else ""
