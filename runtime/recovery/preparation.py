"""What is prepared for the next fault while all ranks train: standbys, copies on other nodes."""

from __future__ import annotations

from msc.runtime.checkpoint.marks import Mark
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.ranks import Ranks

_COUNT_S = 1.0
"""Between two looks at which snapshots have copies."""


class Preparation:
    """For `ranks`; copies: whether nodes keep copies of each other's snapshots."""

    def __init__(self, ranks: Ranks, copies: bool, events: Events) -> None:
        self._ranks = ranks
        self._copies = copies
        self._events = events
        self._done = False
        self._next_count = 0.0
        self._copied: Mark | None = None

    def is_disturbed(self) -> None:
        """It has to be done again when all train."""
        self._done = False

    def turn(self, now: float) -> None:
        """All ranks train."""
        if not self._done:
            self._done = True
            self._prepare()
        if now > self._next_count:
            self._next_count = now + _COUNT_S
            self._count()

    def _prepare(self) -> None:
        ranks = self._ranks
        for node in ranks.roster:
            node.send("stand by", least=ranks.layout.nproc if node.index is None else 0)
        for node, source in ranks.roster.copies() if self._copies else ():
            of = [] if source is None or source.index is None else ranks.on_node(source.index)
            node.send("copy", address=None if source is None else source.address, ranks=of)

    def _count(self) -> None:
        """Note the newest step that the loss of a node cannot take away."""
        copied = self._ranks.roster.newest_common(nodes=2)
        if copied is not None and copied != self._copied:
            self._copied = copied
            self._events.record("copied", generation=copied.generation, step=copied.step)
