"""One recovery, from the fault to the first new step, and how long its parts took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msc.runtime.recovery.events import Events
from msc.runtime.recovery.faults import Fault


@dataclass
class Repair:
    """Times are those of `time.monotonic`, 0 while it is not so far.

    faults: what it began with; none where more ranks go on.
    left: all survivors were out of their group; joined: all ranks were there; load_s: of the
    slowest rank; source, step: where the state came from, and of which step it is; caught_up: the
    first new step; standbys: how many took a rank.
    """

    faults: list[Fault]
    noticed: float = field(default_factory=time.monotonic)
    left: float = 0.0
    joined: float = 0.0
    restored: float = 0.0
    load_s: float = 0.0
    source: str = ""
    step: int = 0
    caught_up: int | None = None
    replaced: set[int] = field(default_factory=set)
    standbys: int = 0

    def parts(self) -> dict[str, float]:
        """Seconds of each part; they add up to the whole."""
        now = time.monotonic()
        left = min(max(self.left, self.noticed), self.joined)
        both = self.restored - self.joined
        load = min(self.load_s, both)
        return {
            "detect": self.faults[0].detect_s if self.faults else 0.0,
            "tear down": left - self.noticed,
            "start": self.joined - left,
            "groups": both - load,
            "load": load,
            "catch up": now - self.restored,
        }

    def tell(self, generation: int, events: Events) -> None:
        """Say that the run is where it was, in `generation`, and what that took."""
        parts = self.parts()
        whole = sum(parts.values())
        events.record(
            "recovered",
            generation=generation,
            restored=self.step,
            step=self.caught_up,
            source=self.source,
            replaced=sorted(self.replaced),
            standbys=self.standbys,
            seconds=whole,
            parts=parts,
        )
        listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        ranks = ", ".join(map(str, sorted(self.replaced))) or "none"
        events.say(
            f"generation {generation}: recovered in {whole:.2f} s ({listed}); state from "
            f"{self.source}; ranks replaced: {ranks}, {self.standbys} by a standby"
        )
