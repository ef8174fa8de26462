"""What a rank notes of itself as it runs: its ring of communications and its ledger of time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from msc.runtime.diagnosis import ledger as classes
from msc.runtime.diagnosis.ledger import Ledger
from msc.runtime.diagnosis.ring import Ring

_CLASS_OF = {
    "idle": classes.IDLE,
    "data": classes.DATA,
    "step": classes.COMPUTE,
    "save": classes.SNAPSHOT,
    "load": classes.LOAD,
}


class Recorder:
    """Tells the ring and the ledger of a rank what it does; the phases are the ring's."""

    def __init__(self, ring: Ring, ledger: Ledger) -> None:
        self.ring = ring
        self.ledger = ledger
        self._phase = ""
        self._process = os.getpid()

    def phase(self, name: str, step: int | None = None) -> None:
        """What the rank does now; with a step's number where one begins."""
        self._phase = name
        self.ring.phase(name, step)
        if step is not None:
            self.ledger.begin_step(step)
        elif name in ("failed", "lost"):
            self.ledger.fail(waited=name == "lost")
        elif name == "ended":
            self.ledger.end()
        else:
            self.ledger.switch(_CLASS_OF[name])

    def step_done(self) -> None:
        """The step that began last is done."""
        self._phase = "idle"
        self.ring.phase("idle")
        self.ledger.end_step()

    def end_unless_cut_off(self) -> None:
        """The process ends, or the run is not used any more: it ended well if nothing was begun."""
        raised = hasattr(sys, "last_value")
        if self._phase == "idle" and not raised and os.getpid() == self._process:
            self.phase("ended")

    def enter(self, token: int) -> int:
        """A wait for what was started begins; a token for `leave`."""
        self.ledger.switch(classes.COMMUNICATION)
        return self.ring.enter(token)

    def leave(self, place: int) -> None:
        """The wait is over; the rank computes."""
        self.ring.leave(place)
        self.ledger.switch(classes.COMPUTE)

    def saving(self, settle: Callable[[], None]) -> Callable[[], None]:
        """`settle`, which waits inside of a step for the copy of its state."""

        def settled() -> None:
            self.ledger.switch(classes.SNAPSHOT)
            settle()
            self.ledger.switch(classes.COMPUTE)

        return settled
