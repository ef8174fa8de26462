"""Lets work on a CUDA stream last a given time, by the device's own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def note_time(began):  # type: ignore[no-untyped-def]
    tl.store(began, globaltimer())


@triton.jit(do_not_specialize=["nanoseconds"])
def spin_until(began, nanoseconds):  # type: ignore[no-untyped-def]
    end = tl.load(began) + nanoseconds
    while globaltimer() < end:
        pass


class Pace:
    """Calls what it is given; on the current stream what follows comes after `nanoseconds`, no
    earlier. On the CPU only the call is made.
    """

    def __init__(self, device: str, nanoseconds: int) -> None:
        self._began = torch.zeros(1, dtype=torch.int64, device=device)
        self._nanoseconds = nanoseconds

    def __call__(self, work: Callable[[], None]) -> None:
        if not self._began.is_cuda:
            work()
            return
        note_time[(1,)](self._began, num_warps=1)
        work()
        spin_until[(1,)](self._began, self._nanoseconds, num_warps=1)
