"""The snapshots that a node holds in host memory: of its own ranks, and copies of another node's.

Other threads read them while the agent's puts them in and out.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass

from msc.runtime.checkpoint.marks import BYTES, SLOTS, Mark, Marks
from msc.runtime.recovery.arenas import HeldArena


@dataclass(frozen=True)
class Book:
    """A snapshot that was found: the open file is the reader's, who closes it."""

    handle: int
    marks: int
    slot: int

    def close(self) -> None:
        """Give it back."""
        os.close(self.handle)


class Shelf:
    """Arenas by rank. epoch: grows when all are thrown away."""

    def __init__(self) -> None:
        self.epoch = 0
        self._lock = threading.Lock()
        self._own: dict[int, HeldArena] = {}
        self._copies: dict[int, HeldArena] = {}

    def put(self, rank: int, arena: HeldArena) -> None:
        """Hold the arena of an own rank, in place of the one before."""
        with self._lock:
            _close(self._own.pop(rank, None))
            self._own[rank] = arena

    def copies(self, rank: int) -> set[Mark]:
        """The complete copies of a rank's snapshots."""
        with self._lock:
            arena = self._copies.get(rank)
            return set() if arena is None else set(arena.steps())

    def copy_into(self, rank: int, stride: int, epoch: int) -> int | None:
        """The arena for copies of a rank, with slots of `stride` bytes, made if there is none.

        A descriptor, which is the caller's; None if all were thrown away since `epoch`.
        """
        with self._lock:
            if epoch != self.epoch:
                return None
            arena = self._copies.get(rank)
            if arena is None or arena.marks != SLOTS * stride:
                _close(arena)
                arena = self._copies[rank] = _new_arena(rank, stride)
            return os.dup(arena.handle)

    def keep_copies(self, ranks: Collection[int]) -> None:
        """Throw copies of other ranks than these away."""
        with self._lock:
            for rank in [rank for rank in self._copies if rank not in ranks]:
                _close(self._copies.pop(rank))

    def keep_own(self, ranks: Collection[int]) -> None:
        """Throw arenas of ranks away that are elsewhere now."""
        with self._lock:
            for rank in [rank for rank in self._own if rank not in ranks]:
                _close(self._own.pop(rank))

    def clear(self, epoch: int) -> None:
        """Throw all away."""
        with self._lock:
            self.epoch = epoch
            for arena in (*self._own.values(), *self._copies.values()):
                arena.close()
            self._own.clear()
            self._copies.clear()

    def marks(self) -> dict[int, set[Mark]]:
        """The complete snapshots of each rank."""
        found: dict[int, set[Mark]] = {}
        with self._lock:
            for arenas in (self._own, self._copies):
                for rank, arena in arenas.items():
                    found.setdefault(rank, set()).update(arena.steps())
        return found

    def own_marks(self) -> dict[int, set[Mark]]:
        """The same of own ranks only."""
        with self._lock:
            return {rank: set(arena.steps()) for rank, arena in self._own.items()}

    def find(self, rank: int, mark: Mark) -> Book | None:
        """A snapshot, if it is here and complete."""
        with self._lock:
            for arena in (self._own.get(rank), self._copies.get(rank)):
                slot = None if arena is None else arena.steps().get(mark)
                if arena is not None and slot is not None:
                    return Book(os.dup(arena.handle), arena.marks, slot)
        return None


def _close(arena: HeldArena | None) -> None:
    if arena is not None:
        arena.close()


def _new_arena(rank: int, stride: int) -> HeldArena:
    """Empty memory for two snapshots."""
    start = SLOTS * stride
    handle = os.memfd_create(f"msc-copy-{rank}")
    os.ftruncate(handle, start + BYTES)
    area = mmap.mmap(handle, BYTES, offset=start)
    with area, memoryview(area) as view:
        Marks(view)
    return HeldArena(handle, start)
