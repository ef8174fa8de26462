"""The rings of a node's ranks: how far they are, and what they did last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msc.runtime.diagnosis.ring import RankView, read_pulse, read_ring, view_to_data


def what_it_did(view: RankView) -> str:
    """What a rank did last, in words."""
    wait = view.open_wait
    return f"while it waited on {wait.channel}" if wait else f"in phase '{view.phase}'"


class Rings:
    """Reads the rings of the ranks that are on this host."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[Path, Path]] = {}
        self._said: dict[int, bytes] = {}

    def watch(self, rank: int, ring: Path, schedule: Path) -> None:
        """A rank writes into this ring from now on."""
        self._files[rank] = ring, schedule

    def forget(self, rank: int) -> None:
        """A rank is on this host no more."""
        self._files.pop(rank, None)
        self._said.pop(rank, None)

    def view(self, rank: int) -> RankView | None:
        """What a rank's ring says; None if it has none."""
        try:
            return read_ring(self._files[rank][0])
        except (KeyError, OSError, ValueError):
            return None

    def news(self) -> dict[int, int]:
        """The steps of the ranks that have got on since this was asked last."""
        found = {}
        for rank, (ring, _) in self._files.items():
            pulse = read_pulse(ring)
            if pulse is not None and pulse[0] != self._said.get(rank):
                self._said[rank], found[rank] = pulse
        return found

    def all(self) -> list[dict[str, Any]]:
        """Rank, view and schedule of each ring, as JSON has them; without a view of one that
        cannot be read."""
        found = []
        for rank, (_, schedule) in self._files.items():
            view = self.view(rank)
            found.append(
                {
                    "rank": rank,
                    "view": None if view is None else view_to_data(view),
                    "schedule": schedule.read_text(),
                }
            )
        return found
