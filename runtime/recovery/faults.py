"""What can happen to a rank, in words, and whether it is worth another try."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Fault:
    """What happened to a rank, to a node and all its ranks (`node`, `lost`), or to the connections
    of all (rank None).

    doing: what it did then; code: the exit code for the whole job if this is the end; program:
    whether the program itself may be the cause, so that it would come again; final: whether it
    certainly would; restart: whether only new processes for all ranks can help; detect_s: how long
    it took to see it, at most.
    """

    rank: int | None
    what: str
    step: int | None
    doing: str = ""
    code: int = 1
    program: bool = False
    final: bool = False
    restart: bool = False
    detect_s: float = 0.0
    node: str = ""
    lost: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = "the group of all ranks" if self.rank is None else f"rank {self.rank}"
        if self.node:
            ranks = f"rank{'s' * (len(self.lost) > 1)} {', '.join(map(str, self.lost))}"
            who = f"{self.node} with {ranks}"
        where = "" if self.step is None else f" in step {self.step}"
        return f"{who} {self.what}{where}" + (f", {self.doing}" if self.doing else "")

    def alone(self) -> str:
        """The same of the only fault of a run, which ends with it."""
        if self.rank is None:
            return str(self)
        if self.what.startswith("ended"):
            return f"Rank {self.rank} failed with exit code {self.code}"
        return f"Rank {self.rank} {self.what}"


class Memory:
    """Remembers faults, so that one that comes back ends the job."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[int | None, str, int | None]] = Counter()

    def hopeless(self, faults: Sequence[Fault]) -> str:
        """Why it is no use to try again; "" if it is of use."""
        for fault in faults:
            if fault.final:
                return "it would fail again"
            key = (fault.rank, fault.what, fault.step)
            self._seen[key] += 1
            if fault.program and self._seen[key] > 1:
                return "the same failure came back after another try"
        return ""


def of_exit(code: int) -> tuple[str, bool]:
    """An exit code in words, and whether the program may be the cause."""
    if code >= 0:
        return f"ended with exit code {code}", True
    number = signal.Signals(-code)
    if number in _FROM_OUTSIDE:
        return f"was killed ({number.name})", False
    return f"crashed ({number.name})", True
