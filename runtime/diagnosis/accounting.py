"""Accounts of a run: the attempts of every rank, and the time between them, class by class.

Between two attempts nobody writes. After one that ended as it should, that time is idle. After one
that did not, it is "detect" until the first rank knew of the failure, then "repair"; if no rank has
noted it, nobody knew until the next attempt of any rank began. The time in which a rank is missing,
since the others go on without it, is "repair" by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msc.runtime.diagnosis.ledger import (
    CLASSES,
    COMMUNICATION,
    COMPUTE,
    DETECT,
    IDLE,
    REPAIR,
    Attempt,
)


@dataclass(frozen=True)
class Account:
    """Where a rank's time went. seconds: of each class; they sum to `wall_s`."""

    rank: int
    wall_s: float
    seconds: Mapping[str, float]
    attempts: int
    last_step: int

    @property
    def effective_s(self) -> float:
        """Steps that were done for the first time, without what they waited for data or copies."""
        return self.seconds[COMPUTE] + self.seconds[COMMUNICATION]

    @property
    def effective(self) -> float:
        """Effective training time as a share of the wall time."""
        return self.effective_s / self.wall_s if self.wall_s else 0.0


def accounts(ledgers: Mapping[int, Sequence[Attempt]]) -> list[Account]:
    """The account of each rank, in order; a rank without an attempt has none.

    A rank that is gone has lost time until the last one is, or until now where some rank runs.
    """
    started = {rank: attempts for rank, attempts in ledgers.items() if attempts}
    everything = [attempt for attempts in started.values() for attempt in attempts]
    end = max((attempt.end_s for attempt in everything), default=0.0)
    known = sorted(t for a in everything for t in (a.noticed_s, a.began_s) if t)
    return [_account(rank, started[rank], end, known) for rank in sorted(started)]


def _account(rank: int, attempts: Sequence[Attempt], end: float, known: Sequence[float]) -> Account:
    seconds = dict.fromkeys(CLASSES, 0.0)
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        for name, spent in attempt.seconds.items():
            seconds[name] += spent
        if following is not None:
            _add_gap(seconds, attempt, following.began_s, known)
        elif not attempt.ended:
            _add_gap(seconds, attempt, end, known)
    steps = max(attempt.last_step for attempt in attempts)
    return Account(rank, sum(seconds.values()), seconds, len(attempts), steps)


def _add_gap(
    seconds: dict[str, float], attempt: Attempt, until: float, known: Sequence[float]
) -> None:
    start = attempt.end_s
    until = max(start, until)  # a clock's tick may lie between them
    length = until - start
    if attempt.ended:
        seconds[IDLE] += length
    elif attempt.last == REPAIR:
        seconds[REPAIR] += length
    else:
        first = next((moment for moment in known if start <= moment <= until), until)
        seconds[DETECT] += min(first - start, length)
        seconds[REPAIR] += length - min(first - start, length)


def mean(found: Sequence[Account]) -> dict[str, float]:
    """Seconds of each class, the mean over ranks."""
    return {name: sum(each.seconds[name] for each in found) / len(found) for name in CLASSES}


def worst(found: Sequence[Account]) -> Account:
    """The rank with the least effective training time."""
    return min(found, key=lambda each: each.effective)
