"""The way back to all ranks: processes on lost places, which come as far as to meet the others."""

from __future__ import annotations

import math
from typing import Any

from msc.ir.torch_private import TCPStore
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.members import Member, Stage
from msc.runtime.recovery.places import Place, Places
from msc.runtime.recovery.ranks import Ranks

_ASK_AGAIN_S = 30.0
"""After a step could not be saved, the ranks are asked again to give way."""


class Growth:
    """Tries lost places: each by a process that runs the script as one of all ranks.

    A place is back when its process has a program and waits for the others, so that what will run
    there has been tried, and is compiled by then.
    """

    def __init__(self, places: Places, ranks: Ranks, events: Events) -> None:
        self._places = places
        self._ranks = ranks
        self._events = events
        self._tries: dict[Place, Member] = {}
        self._store: TCPStore | None = None
        self._next_ask = 0.0

    def turn(self, now: float) -> None:
        """Try lost places, and ask the ranks to give way, once, when all places are back."""
        self._try(now)
        ranks = self._ranks
        all_nodes = len(ranks.roster.seated) == ranks.layout.nnodes
        if all_nodes and self.is_complete and now >= self._next_ask:
            self._next_ask = math.inf
            ranks.send(ranks.members[0], "grow")

    def may_ask(self) -> None:
        """Another generation has not been asked yet."""
        self._next_ask = 0.0

    def is_put_off(self, now: float) -> None:
        """The ranks that were asked go on, since their step was not saved."""
        self._next_ask = now + _ASK_AGAIN_S

    def _try(self, now: float) -> None:
        """Start a process on each lost place of a node that is there, if its time has come."""
        ranks = self._ranks
        for place in self._places.to_try(now):
            node = ranks.roster.seated.get(place.node)
            if place in self._tries or node is None:
                continue
            if self._store is None:
                self._store = ranks.another_store()
            rank = self._places.full.index(place)
            member = self._tries[place] = Member(rank, ranks.new_process())
            environment = ranks.environment(ranks.layout.on(None), rank, self._store)
            node.send("try", rank=rank, process=member.process, environment=environment)

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
            self._drop(place)
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
        store = self._store or self._ranks.another_store()
        for place in [p for p, m in self._tries.items() if m.stage is not Stage.WAITS]:
            self._drop(place)
        waiting = {member.rank: member for member in self._tries.values()}
        self._tries = {}
        self._store = None
        self._places.restore()
        return store, waiting

    def _drop(self, place: Place) -> None:
        member = self._tries.pop(place)
        self._ranks.roster.seated[place.node].send("drop", process=member.process)
