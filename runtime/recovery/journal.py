"""The losses of a run, in memory that outlives every rank: for who takes over, and to compare.

8 bytes      which Trainer of the script the steps are of
per step     whether it is there, and whether it has a norm (lowest 8 bits), and on how many ranks
             it was taken; loss, norm, learning rate
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

_HEAD = struct.Struct("<q")
_ENTRY = struct.Struct("<qddd")
_THERE, _HAS_NORM = 1, 2
_FLAG_BITS = 8


@dataclass(frozen=True)
class Entry:
    """What a step came to; norm is None where the optimizer needs none.

    ranks: on how many it was taken, 0 where that is not known.
    """

    loss: float
    norm: float | None
    rate: float
    ranks: int = 0


class Journal:
    """A file of entries, one a step; all ranks write the same ones, so one of them does.

    handle: of the open file.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @staticmethod
    def new() -> Journal:
        """An empty one, without a name in any file system."""
        return Journal(os.memfd_create("msc-journal"))

    def begin(self, trainer: int) -> None:
        """The steps that follow are those of the script's Trainer number `trainer`."""
        found = os.pread(self.handle, _HEAD.size, 0)
        if found != _HEAD.pack(trainer):
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, _HEAD.pack(trainer), 0)

    def replace(self, data: bytes) -> None:
        """Take over all that the journal of another host has."""
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, data, 0)

    def clear(self) -> None:
        """Forget all."""
        os.ftruncate(self.handle, 0)

    @property
    def steps(self) -> int:
        """How many steps were ever taken."""
        return max(0, os.fstat(self.handle).st_size - _HEAD.size) // _ENTRY.size

    def write(self, step: int, entry: Entry) -> Entry | None:
        """Note step `step` (from 1); returns what was noted for it before."""
        before = self._read(step)
        flags = _THERE | (0 if entry.norm is None else _HAS_NORM)
        norm = 0.0 if entry.norm is None else entry.norm
        packed = _ENTRY.pack(flags | entry.ranks << _FLAG_BITS, entry.loss, norm, entry.rate)
        os.pwrite(self.handle, packed, _HEAD.size + (step - 1) * _ENTRY.size)
        return before

    def fill(self, step: int, entry: Entry) -> None:
        """Note step `step` unless it is there, with this loss."""
        before = self._read(step)
        if before is None or before.loss != entry.loss:
            self.write(step, entry)

    def cut(self, steps: int) -> None:
        """Forget all but the first so many steps."""
        os.ftruncate(self.handle, _HEAD.size + steps * _ENTRY.size)

    def first(self, count: int) -> list[Entry]:
        """Steps 1 to `count`."""
        found = [self._read(step) for step in range(1, count + 1)]
        return [entry for entry in found if entry is not None]

    def _read(self, step: int) -> Entry | None:
        raw = os.pread(self.handle, _ENTRY.size, _HEAD.size + (step - 1) * _ENTRY.size)
        if len(raw) < _ENTRY.size:
            return None
        flags, loss, norm, rate = _ENTRY.unpack(raw)
        if not flags:
            return None
        return Entry(loss, norm if flags & _HAS_NORM else None, rate, flags >> _FLAG_BITS)
