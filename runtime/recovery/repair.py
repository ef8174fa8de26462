"""One recovery, from the fault to the first new step, and how long its parts took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msc.runtime.recovery.faults import Fault


@dataclass
class Repair:
    """Times are those of `time.monotonic`, 0 while it is not so far.

    left: all survivors were out of their group; joined: all ranks were there; groups_s, load_s:
    of the slowest rank; source: where the state came from; standbys: how many took a rank;
    caught_up: the first new step.
    """

    faults: list[Fault]
    noticed: float = field(default_factory=time.monotonic)
    left: float = 0.0
    joined: float = 0.0
    restored: float = 0.0
    groups_s: float = 0.0
    load_s: float = 0.0
    source: str = ""
    caught_up: int | None = None
    replaced: set[int] = field(default_factory=set)
    standbys: int = 0

    def parts(self) -> dict[str, float]:
        """Seconds of each part; they add up to the whole."""
        now = time.monotonic()
        left = min(max(self.left, self.noticed), self.joined)
        both = self.restored - self.joined
        groups = min(self.groups_s, both)
        return {
            "detect": self.faults[0].detect_s,
            "tear down": left - self.noticed,
            "start": self.joined - left,
            "groups": groups,
            "load": both - groups,
            "catch up": now - self.restored,
        }
