"""A rank of a run, as its controller knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from msc.runtime.recovery.faults import Fault


class Stage(Enum):
    """What a rank does."""

    HOMELESS = "has no node"  # and so no process: it waits for one
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

    process: the number of its process, of which the run has each once, so that what an earlier one
    tells late is told apart; trainer: which Trainer of its script it has made last; told: the
    failure that it has told; deadline: when it is to have left its group.
    """

    rank: int
    process: int
    stage: Stage = Stage.STARTS
    trainer: int = 0
    fit: Fit | None = None
    told: str = ""
    deadline: float = 0.0

    def fault(self, what: str, step: int | None, doing: str, **facts: Any) -> Fault:
        """What has happened to it; the other arguments are those of `Fault`."""
        if self.told and "raised" not in what:
            doing = f"after {self.told}"
        return Fault(self.rank, what, step or None, doing, **facts)

    def can_go_on(self) -> bool:
        """Whether its process can go on after a fault of another one."""
        if self.stage is Stage.STARTS:
            return True
        if self.stage is Stage.ENDED or self.trainer != 1:
            return False
        if self.fit is None:
            return self.stage is Stage.WAITS
        return self.fit.stays and self.fit.calls == 1
