"""What all ranks have done, asked of the agents of their nodes when one has failed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msc.runtime.diagnosis.blame import Cause
from msc.runtime.diagnosis.ring import RankView
from msc.runtime.recovery.health import Health
from msc.runtime.recovery.roster import Node

_PATIENCE_S = 1.0
"""A node that does not answer within that is asked no more."""

Found = list[tuple[Cause, RankView | None]]


class Inquiry:
    """Asks `nodes` for the rings of their ranks, twice."""

    def __init__(self, nodes: Sequence[Node], now: float) -> None:
        self._nodes = nodes
        self._until = now + _PATIENCE_S
        self._first: Found | None = None
        self._ask()

    def _ask(self) -> None:
        for node in self._nodes:
            node.rings = None
            node.send("read rings")

    def answer(self, health: Health, world: int) -> Found | None:
        """The ranks that have done something else than their programs; None: not known yet."""
        if any(node.rings is None for node in self._nodes):
            return None if time.monotonic() < self._until else []
        rings: list[Mapping[str, Any]] = list(
            itertools.chain(*(node.rings or () for node in self._nodes))
        )
        for node in self._nodes:
            node.rings = None
        found = health.mismatches(rings, world)
        if not found:
            return found
        if self._first is None:
            self._first = found
            self._ask()
            return None
        before = [cause for cause, _ in self._first]
        return [(cause, view) for cause, view in found if cause in before]
