"""The snapshots of ranks in host memory, as a node's agent holds them: a dead rank's outlive it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msc.runtime.checkpoint.marks import Mark, read_marks


@dataclass(frozen=True)
class HeldArena:
    """A rank's arena: the open file, and where in it the marks of its slots are."""

    handle: int
    marks: int

    def steps(self) -> dict[Mark, int]:
        """The snapshots that are complete, and the slots they are in."""
        return {mark: slot for slot, mark in enumerate(read_marks(self.handle, self.marks)) if mark}

    def close(self) -> None:
        """Give it up."""
        os.close(self.handle)


def newest_common(held: Mapping[int, Collection[Mark]], world: int) -> Mark | None:
    """The newest snapshot that there is of every rank; None if there is none."""
    found = [set(held[rank]) for rank in range(world) if rank in held]
    if len(found) < world:
        return None
    common = found[0].intersection(*found[1:])
    return max(common, key=lambda mark: (mark.step, mark.generation), default=None)
