"""The way back to all ranks: processes on lost places, which come as far as to meet the others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Protocol

from msc.ir.torch_private import TCPStore
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.members import Member, Stage
from msc.runtime.recovery.places import Place, Places

PATIENCE = timedelta(minutes=5)
"""Of a store of a generation."""


def new_store(host: str) -> TCPStore:
    """A store in this process, for ranks that find it at `host`."""
    return TCPStore(host, 0, None, True, PATIENCE, False)


class Give(Protocol):
    """Tells the agent of a member's place something of its process."""

    def __call__(self, member: Member, command: str, store: TCPStore, /) -> None: ...


class Growth:
    """Tries lost places: each by a process that runs the script as one of all ranks.

    A place is back when its process has a program and waits for the others, so that what will run
    there has been tried, and is compiled by then. host: of the stores; number: of a new process;
    give: "try" or "drop" a process.
    """

    def __init__(
        self, places: Places, host: str, number: Callable[[], int], events: Events, give: Give
    ) -> None:
        self._places = places
        self._host = host
        self._number = number
        self._events = events
        self._give = give
        self._tries: dict[Place, Member] = {}
        self._store: TCPStore | None = None

    def turn(self, now: float, nodes: Collection[int]) -> None:
        """Start a process on each lost place of these nodes whose time has come."""
        for place in self._places.to_try(now):
            if place in self._tries or place.node not in nodes:
                continue
            if self._store is None:
                self._store = new_store(self._host)
            member = Member(self._places.full.index(place), self._number())
            self._tries[place] = member
            self._give(member, "try", self._store)

    def hear(self, process: int, event: str, facts: dict[str, Any], now: float) -> bool:
        """Take note of what a process does; False if it is none of these."""
        place = next((p for p, m in self._tries.items() if m.process == process), None)
        if place is None:
            return False
        if event == "ready":
            self._tries[place].stage = Stage.WAITS
            self._tries[place].trainer = facts["trainer"]
            self._events.record("place is back", node=place.node, slot=place.slot)
            self._events.say(f"{place} is back: a process there waits for the others")
        elif event in ("failed", "exit", "frozen"):
            member = self._tries.pop(place)
            assert self._store is not None
            self._give(member, "drop", self._store)
            self._places.lose(place, now)
            self._events.record("tried in vain", node=place.node, slot=place.slot, what=event)
        return True

    def lose(self, node: int, now: float) -> None:
        """A node is gone, and what was tried there."""
        for place in [place for place in self._tries if place.node == node]:
            del self._tries[place]
            self._places.lose(place, now)

    @property
    def is_complete(self) -> bool:
        """Whether all lost places are back."""
        back = [place for place, m in self._tries.items() if m.stage is Stage.WAITS]
        return self._places.are_all_back(back)

    def take(self) -> tuple[TCPStore, dict[int, Member]]:
        """The processes that wait, by rank, and the store that they know; none is lost any more."""
        store = self._store or new_store(self._host)
        waiting = {m.rank: m for m in self._tries.values() if m.stage is Stage.WAITS}
        for member in self._tries.values():
            if member.stage is not Stage.WAITS:
                self._give(member, "drop", store)
        self._tries = {}
        self._store = None
        self._places.restore()
        return store, waiting
