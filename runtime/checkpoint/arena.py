"""Host memory that the trainer and its writing process share: two slots, each a file's image."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from msc.runtime.checkpoint.marks import (
    BYTES,
    SLOTS,
    Digest,
    Mark,
    Marks,
    read_digest,
    read_marks,
    read_note,
    withdraw,
)


class Arena:
    """Memory without a name in any file system: it is gone with the last process that has it.

    size: bytes of a slot. All pages exist before the first save; on CUDA they are pinned, so that
    the device copies into them by itself. marks: which snapshot each slot holds, in the bytes from
    `marks_start` on.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.stride = stride_of(size)
        self.marks_start = SLOTS * self.stride
        total = self.marks_start + BYTES
        self.handle = _memory(total)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(self.handle, total, mmap.MAP_SHARED | populate)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        if not populate:
            whole.zero_()
        if device.type == "cuda":
            _pin(whole)
        self.marks = Marks(memoryview(self._map)[self.marks_start :])
        self._whole = whole
        self.slots = [whole[i * self.stride : i * self.stride + size] for i in range(SLOTS)]

    def complete(self, slot: int, mark: Mark) -> None:
        """A slot holds a snapshot, and its note: from here on nothing of it may change."""
        note = read_note(self.handle, self.marks_start, slot)
        start = slot * self.stride
        self.marks.set(slot, mark, _digest(self._whole[start : start + self.stride], note))


def stride_of(size: int) -> int:
    """From one slot to the next, where a slot has `size` bytes."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


class OtherArena:
    """A slot of the arena of another process of this host, of which `handle` is the open file.

    mark: of the snapshot that it holds, None if it was withdrawn.
    """

    def __init__(self, handle: int, size: int, slot: int) -> None:
        stride = stride_of(size)
        start = SLOTS * stride
        whole = torch.frombuffer(mmap.mmap(handle, start + BYTES), dtype=torch.uint8)
        self.mark = read_marks(handle, start)[slot]
        self._place = handle, start, slot
        self.note = read_note(handle, start, slot)
        self._slot = whole[slot * stride : (slot + 1) * stride]
        self.image = self._slot[:size]

    def is_intact(self) -> bool:
        """Whether the slot holds, to the last bit, what its owner has put there."""
        return read_digest(*self._place) == _digest(self._slot, self.note)

    def withdraw(self) -> None:
        """Let nobody use the slot again until it is written anew."""
        withdraw(*self._place)


def _digest(slot: torch.Tensor, note: str) -> int:
    found = Digest()
    found.update(slot.numpy().data)
    return found.finish(note)


def _memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("msc-checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle


def _pin(memory: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    torch.cuda.check_error(int(code))
