"""What says which snapshot a slot of an arena holds, behind the slots: it outlives the trainer.

per slot   generation and step of a complete snapshot, step -1 while it is being copied; a digest
per slot   the bytes of a text, and the text: what is no tensor
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

import xxhash

_MARK = struct.Struct("<qqQ")
_LENGTH = struct.Struct("<q")
_NONE = (0, -1, 0)
SLOTS = 2
_HEAD_BYTES = mmap.PAGESIZE
_NOTE_BYTES = 1 << 16
BYTES = _HEAD_BYTES + SLOTS * _NOTE_BYTES
"""Of the whole area."""


class Digest:
    """Of all that a slot holds: its bytes, part after part, and then the text beside it."""

    def __init__(self) -> None:
        self._found = xxhash.xxh3_64()

    def update(self, part: memoryview) -> None:
        """The next bytes of the slot, to its very end."""
        self._found.update(part)

    def finish(self, note: str) -> int:
        """The digest, 64 bits."""
        self._found.update(note.encode())
        return self._found.intdigest()


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
        _MARK.pack_into(self._view, slot * _MARK.size, *_NONE)

    def note(self, slot: int, text: str) -> bool:
        """Put a text beside the slot; False if it is too long."""
        data = text.encode()
        if len(data) > _NOTE_BYTES - _LENGTH.size:
            return False
        start = _HEAD_BYTES + slot * _NOTE_BYTES
        _LENGTH.pack_into(self._view, start, len(data))
        self._view[start + _LENGTH.size : start + _LENGTH.size + len(data)] = data
        return True

    def set(self, slot: int, mark: Mark, digest: int) -> None:
        """The slot is complete; `digest` as `Digest` has it."""
        _MARK.pack_into(self._view, slot * _MARK.size, mark.generation, mark.step, digest)


def read_marks(handle: int, start: int) -> list[Mark | None]:
    """The mark of each slot, None where no snapshot is complete; the area begins at `start`."""
    raw = os.pread(handle, SLOTS * _MARK.size, start)
    found = [Mark(*_MARK.unpack_from(raw, slot * _MARK.size)[:2]) for slot in range(SLOTS)]
    return [mark if mark.step >= 0 else None for mark in found]


def read_digest(handle: int, start: int, slot: int) -> int:
    """The digest of a complete slot."""
    raw = os.pread(handle, _MARK.size, start + slot * _MARK.size)
    return int(_MARK.unpack(raw)[2])


def withdraw(handle: int, start: int, slot: int) -> None:
    """A slot, of any process, is not to be used again until it is written anew."""
    os.pwrite(handle, _MARK.pack(*_NONE), start + slot * _MARK.size)


def read_note(handle: int, start: int, slot: int) -> str:
    """The text beside a slot."""
    place = start + _HEAD_BYTES + slot * _NOTE_BYTES
    (length,) = _LENGTH.unpack(os.pread(handle, _LENGTH.size, place))
    return os.pread(handle, length, place + _LENGTH.size).decode()
