"""The snapshots of all ranks in host memory, as the agent holds them: a dead rank's outlive it."""

from __future__ import annotations

import os
from collections.abc import Mapping
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


def newest_common(arenas: Mapping[int, HeldArena], world: int) -> tuple[int, list[int]] | None:
    """The newest step that all ranks have, and the slot of each; None if there is none."""
    found = [arenas[rank].steps() for rank in range(world) if rank in arenas]
    if len(found) < world:
        return None
    common = set(found[0]).intersection(*found[1:])
    if not common:
        return None
    newest = max(common, key=lambda mark: (mark.step, mark.generation))
    return newest.step, [steps[newest] for steps in found]
