"""Host memory that the trainer and its writing process share: two slots, each a file's image."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

SLOTS = 2


class Arena:
    """Memory without a name in any file system: it is gone with the last process that has it.

    size: bytes of a slot. All pages exist before the first save; on CUDA they are pinned, so that
    the device copies into them by itself.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.stride = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.handle = _memory(SLOTS * self.stride)
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(self.handle, SLOTS * self.stride, mmap.MAP_SHARED | populate)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        if not populate:
            whole.zero_()
        if device.type == "cuda":
            _pin(whole)
        self.slots = [whole[i * self.stride : i * self.stride + size] for i in range(SLOTS)]


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
