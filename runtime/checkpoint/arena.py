"""Host memory that the trainer and its writing process share: two slots, each a file's image."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from msc.runtime.checkpoint.marks import BYTES, SLOTS, Marks, read_marks, read_note


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
        self.slots = [whole[i * self.stride : i * self.stride + size] for i in range(SLOTS)]


def stride_of(size: int) -> int:
    """From one slot to the next, where a slot has `size` bytes."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


class OtherArena:
    """A slot of the arena of another process of this host, of which `handle` is the open file."""

    def __init__(self, handle: int, size: int, slot: int) -> None:
        stride = stride_of(size)
        start = SLOTS * stride
        whole = torch.frombuffer(mmap.mmap(handle, start + BYTES), dtype=torch.uint8)
        mark = read_marks(handle, start)[slot]
        assert mark is not None
        self.mark = mark
        self.note = read_note(handle, start, slot)
        self.image = whole[slot * stride : slot * stride + size]


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
