"""The ranks of a run, as its agent knows them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from msc.runtime.recovery.arenas import HeldArena
from msc.runtime.recovery.process import Worker


class Stage(Enum):
    """What a rank does."""

    STARTS = "starts"  # its process runs the script and has no Trainer yet
    WAITS = "waits"  # for the generation to form
    JOINS = "joins"  # makes its groups and gets its state
    RUNS = "runs"
    LEAVES = "leaves"  # its group, after a fault
    ENDED = "ended"


@dataclass(frozen=True)
class Fit:
    """The call of `Trainer.fit` that a rank is inside of; stays: whether it can go back in it.

    Only in the first call is a new process, which runs the script from its beginning, sure to be
    at the same place as the others when both come out of it.
    """

    calls: int
    last: int
    stays: bool


@dataclass
class Member:
    """A rank, whichever process has it.

    trainer: which Trainer of its script it has made last; arena: its snapshots, until it has its
    state and they count; told: the failure that it has told; deadline: when it is to have left its
    group; seen: when its process was last known to run; stopped: since when it is stopped.
    """

    rank: int
    worker: Worker
    stage: Stage = Stage.STARTS
    trainer: int = 0
    fit: Fit | None = None
    arena: HeldArena | None = None
    told: str = ""
    deadline: float = 0.0
    seen: float = field(default_factory=time.monotonic)
    stopped: float | None = None

    def can_go_on(self) -> bool:
        """Whether its process can go on after a fault of another one."""
        if self.stage is Stage.STARTS:
            return True
        if self.stage is Stage.ENDED or self.trainer != 1:
            return False
        if self.fit is None:
            return self.stage is Stage.WAITS
        return self.fit.stays and self.fit.calls == 1

    def offer(self, arena: HeldArena) -> None:
        """Take the snapshots of a Trainer: a replacement begins with the first, and so can use
        those of no other."""
        self.withdraw()
        if self.trainer > 1:
            arena.close()
        else:
            self.arena = arena

    def withdraw(self) -> None:
        """Give up snapshots that do not count yet."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
