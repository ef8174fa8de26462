"""What says which snapshot a slot of an arena holds, behind the slots: it outlives the trainer.

per slot   generation and step of a complete snapshot, step -1 while it is being copied
per slot   the bytes of a text, and the text: what is no tensor
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

_MARK = struct.Struct("<qq")
_LENGTH = struct.Struct("<q")
SLOTS = 2
_HEAD_BYTES = mmap.PAGESIZE
_NOTE_BYTES = 1 << 16
BYTES = _HEAD_BYTES + SLOTS * _NOTE_BYTES
"""Of the whole area."""


@dataclass(frozen=True)
class Mark:
    """The snapshot of a step, taken in a generation of the run."""

    generation: int
    step: int


class Marks:
    """The area as the owner of the arena writes it: `view` is its memory, zeros so far."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        for slot in range(SLOTS):
            self.clear(slot)

    @staticmethod
    def existing(view: memoryview) -> Marks:
        """An area that has marks already."""
        marks = Marks.__new__(Marks)
        marks._view = view
        return marks

    def oldest(self) -> int:
        """The slot to be written next: one that is not complete, else that of the older step."""
        found = [_MARK.unpack_from(self._view, slot * _MARK.size) for slot in range(SLOTS)]
        return min(range(SLOTS), key=lambda slot: (found[slot][1], found[slot][0]))

    def clear(self, slot: int) -> None:
        """The slot is about to be written."""
        _MARK.pack_into(self._view, slot * _MARK.size, 0, -1)

    def note(self, slot: int, text: str) -> bool:
        """Put a text beside the slot; False if it is too long."""
        data = text.encode()
        if len(data) > _NOTE_BYTES - _LENGTH.size:
            return False
        start = _HEAD_BYTES + slot * _NOTE_BYTES
        _LENGTH.pack_into(self._view, start, len(data))
        self._view[start + _LENGTH.size : start + _LENGTH.size + len(data)] = data
        return True

    def set(self, slot: int, mark: Mark) -> None:
        """The slot is complete."""
        _MARK.pack_into(self._view, slot * _MARK.size, mark.generation, mark.step)


def read_marks(handle: int, start: int) -> list[Mark | None]:
    """The mark of each slot, None where no snapshot is complete; the area begins at `start`."""
    raw = os.pread(handle, SLOTS * _MARK.size, start)
    found = [Mark(*_MARK.unpack_from(raw, slot * _MARK.size)) for slot in range(SLOTS)]
    return [mark if mark.step >= 0 else None for mark in found]


def read_note(handle: int, start: int, slot: int) -> str:
    """The text beside a slot."""
    place = start + _HEAD_BYTES + slot * _NOTE_BYTES
    (length,) = _LENGTH.unpack(os.pread(handle, _LENGTH.size, place))
    return os.pread(handle, length, place + _LENGTH.size).decode()
