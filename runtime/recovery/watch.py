"""Finds the ranks that are alive without getting on, and the first cause of what others tell."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msc.runtime.diagnosis.blame import MISMATCH
from msc.runtime.diagnosis.ring import RankView
from msc.runtime.recovery.faults import Fault
from msc.runtime.recovery.health import Health
from msc.runtime.recovery.inquiry import Inquiry
from msc.runtime.recovery.ranks import Ranks
from msc.runtime.recovery.rings import what_it_did


class Watch:
    """Over `ranks`. health: how far they are."""

    def __init__(self, ranks: Ranks) -> None:
        self.health = Health()
        self._ranks = ranks
        self._inquiry: Inquiry | None = None

    def begin_anew(self) -> None:
        """The ranks are others now."""
        self.health = Health()

    def look(self) -> list[Fault]:
        """Find who does not get on, while all are inside of `fit`."""
        nodes = list(self._ranks.roster.seated.values())
        if self.health.wants_rings():
            for node in nodes:
                node.rings = None
                node.send("read rings")
        found = [node.rings for node in nodes if node.rings is not None]
        if len(found) < len(nodes):
            return []
        for node in nodes:
            node.rings = None
        return self._judge(list(itertools.chain(*found)))

    def _judge(self, rings: Sequence[Mapping[str, Any]]) -> list[Fault]:
        found = self.health.judge(rings, self._ranks.world)
        if found is None:
            return []
        faults = []
        for cause in found.guilty:
            more = cause.detail if cause.what == MISMATCH else f"for {found.seconds:.1f} s"
            where = _in_its_ring(found.views.get(cause.rank), more)
            member = self._ranks.members[cause.rank]
            faults.append(member.fault(cause.what, *where, program=True, detect_s=found.seconds))
        return faults or [Fault(None, found.text, None, detect_s=found.seconds)]

    def first_causes(self, faults: Sequence[Fault]) -> list[Fault] | None:
        """Put what has caused faults of the program before them; None: rings must be read yet.

        Where a rank has done something else than its program, a crash is no cause but follows: of
        gloo, a collective that others do not have can end any of their processes. Rings are read
        twice, as a rank that goes on may write what is being read.
        """
        if not any(fault.program for fault in faults):
            return list(faults)
        if self._inquiry is None:
            nodes = list(self._ranks.roster.seated.values())
            self._inquiry = Inquiry(nodes, time.monotonic())
        answer = self._inquiry.answer(self.health, self._ranks.world)
        if answer is None:
            return None
        self._inquiry = None
        causes = []
        for cause, view in answer:
            own = next((fault for fault in faults if fault.rank == cause.rank), None)
            if own is None or own.what != cause.what:
                where = _in_its_ring(view, cause.detail)
                member = self._ranks.members[cause.rank]
                causes.append(member.fault(cause.what, *where, program=True))
        guilty = {cause.rank for cause in causes}
        return [*causes, *(fault for fault in faults if fault.rank not in guilty)]


def _in_its_ring(view: RankView | None, more: str) -> tuple[int | None, str]:
    """The step of a rank, and in words `more` and what it did last."""
    did = "" if view is None else what_it_did(view)
    step = None if view is None else view.step
    return step, ", ".join(text for text in (more, did) if text)
