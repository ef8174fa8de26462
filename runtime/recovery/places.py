"""The places of a run's ranks: which of them are lost, and when a lost one is tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_IN_A_ROW = 2
"""How many processes of a place may end before they meet the others."""
_FIRST_S = 2.0
_LONGEST_S = 300.0
"""Between two tries; twice as long each time."""


class Place(NamedTuple):
    """Where a rank can be: a node of the run, and a slot there, which is its LOCAL_RANK."""

    node: int
    slot: int

    def __str__(self) -> str:
        return f"slot {self.slot} of node {self.node}"


class Places:
    """What is known of the places; times are those of `time.monotonic`.

    full: all of them, in the order of the ranks that the run was started for.
    """

    def __init__(self, full: Sequence[Place]) -> None:
        self.full = tuple(full)
        self._early: Counter[Place] = Counter()
        self._next: dict[Place, float] = {}
        self._wait: dict[Place, float] = {}

    @property
    def usable(self) -> list[Place]:
        """Those that are not lost, in order."""
        return [place for place in self.full if place not in self._next]

    def choose(self, count: int) -> list[Place]:
        """So many that are not lost, in order: of the nodes with the most, so that few are cut."""
        usable = self.usable
        left = Counter(place.node for place in usable)
        return sorted(sorted(usable, key=lambda p: (-left[p.node], p))[:count])

    def ended_early(self, place: Place) -> bool:
        """A process there has ended before it met the others; whether the place is lost by that."""
        self._early[place] += 1
        return self._early[place] >= _IN_A_ROW

    def met(self, place: Place) -> None:
        """A process there has come to meet the others."""
        del self._early[place]

    def lose(self, place: Place, now: float) -> None:
        """It is lost, or was tried in vain."""
        wait = self._wait.get(place, _FIRST_S)
        self._next[place] = now + wait
        self._wait[place] = min(2 * wait, _LONGEST_S)
        del self._early[place]

    def to_try(self, now: float) -> list[Place]:
        """The lost ones whose next try is due."""
        return [place for place, moment in self._next.items() if now >= moment]

    def are_all_back(self, back: Sequence[Place]) -> bool:
        """Whether all lost ones are among these; False if none is lost."""
        return bool(self._next) and self._next.keys() <= set(back)

    def restore(self) -> None:
        """None is lost any more."""
        self._next.clear()
