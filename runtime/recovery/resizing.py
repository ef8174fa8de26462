"""On how many ranks a run goes on, and on which places: what is known, and the decision."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msc.runtime.recovery.events import Events
from msc.runtime.recovery.faults import Fault
from msc.runtime.recovery.members import Stage
from msc.runtime.recovery.places import Place, Places
from msc.runtime.recovery.ranks import Ranks
from msc.runtime.recovery.sizes import Size, Sizes


class Resizing:
    """Of a run that was started for ranks on all of `full`, and goes on with `least` of them.

    least: None for no fewer; sizes: what ranks tell; places: which are lost.
    """

    def __init__(self, full: Sequence[Place], least: int | None, events: Events) -> None:
        self.sizes = Sizes()
        self.places = Places(full)
        self._least = len(full) if least is None else least
        self._events = events

    @property
    def whole(self) -> int:
        """How many ranks the run was started for."""
        return len(self.places.full)

    def will_learn(self, ranks: Ranks, faults: Sequence[Fault], patience_s: float) -> bool:
        """Whether processes ended so early that nobody has told on how many ranks the run can be.

        The others are let start for as long as they may take, `patience_s`: they will say it.
        """
        if self._least >= self.whole or self.sizes.known:
            return False
        dead = {fault.rank for fault in faults if fault.rank is not None and not fault.final}
        early = [m for m in ranks.members if m.rank in dead and m.stage is Stage.STARTS]
        others = len(dead) < len(ranks.members)
        late = time.monotonic() - ranks.since > patience_s
        return len(early) == len(faults) and others and not late

    def gone(self, ranks: Ranks, faults: Iterable[Fault]) -> set[Place]:
        """The places on which no process will do, or that have no node to be on, after faults.

        No process will do where two in a row have ended before they met the others.
        """
        here, roster = ranks.layout.places, ranks.roster
        homeless = {place for place in here if place.node not in roster.seated}
        if len({place.node for place in homeless}) <= len(roster.waiting):
            homeless = set()
        failed = [fault.rank for fault in faults if fault.rank is not None]
        starting = [here[rank] for rank in failed if ranks.members[rank].stage is Stage.STARTS]
        return homeless | {place for place in starting if self.places.ended_early(place)}

    def without(self, gone: Collection[Place], nodes: Collection[int]) -> Size | None:
        """Give places up, and all of other nodes than these; the size that the run then has.

        None: it cannot go on without them, and nothing is given up.
        """
        usable = [p for p in self.places.usable if p not in gone and p.node in nodes]
        size = self.sizes.largest(len(usable), self._least)
        if not gone or size is None or self._least >= self.whole:
            return None
        for place in self.places.usable:
            if place not in usable:
                self.places.lose(place, time.monotonic())
        return size

    def why_not(self, gone: int) -> str:
        """Why it does not go on without so many places, to be added to a sentence."""
        if not gone or self._least >= self.whole:
            return ""
        why = self.sizes.why_not(len(self.places.usable) - gone, self._least)
        return f", and it cannot go on with fewer ranks: {why}"

    def tell(self, generation: int, before: int, size: Size, lost: Sequence[Place]) -> None:
        """Say that the run goes on with `size`, where it had `before` ranks."""
        old = self.sizes.of(before) or size
        self._events.record(
            "ranks",
            generation=generation,
            ranks=size.ranks,
            of=self.whole,
            dp=[old.dp, size.dp],
            micro_batches=[old.micro_batches, size.micro_batches],
            lost=lost,
        )
        without = f" without {', '.join(map(str, lost))}" if lost else ""
        self._events.say(
            f"generation {generation}: the run goes on with {size.ranks} of {self.whole} ranks"
            f"{without}: dp {old.dp} -> {size.dp}, micro-batches {old.micro_batches} -> "
            f"{size.micro_batches}; all ranks are started anew, with the state in storage"
        )

    def to_data(self) -> dict[str, Any]:
        """What a controller must know that takes this one's place, as JSON."""
        lost = [place for place in self.places.full if place not in self.places.usable]
        return {"lost": lost, "sizes": self.sizes.to_data()}

    def learn(self, data: Mapping[str, Any]) -> None:
        """Know what `to_data` has said."""
        for place in data["lost"]:
            self.places.lose(Place(*place), time.monotonic())
        self.sizes = Sizes.from_data(data["sizes"])
