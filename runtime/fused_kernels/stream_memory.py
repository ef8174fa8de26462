"""Numbers that CUDA streams write and wait for, in the memory of any device that this one reaches.

Neither takes a processor, so that no kernel can keep them out. torch has only the write, under a
private name; these are of the driver's own interface (CUDA 12, `cuStreamWriteValue32`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

_FENCED = 0
_AT_LEAST = 0


def write(flags: Tensor, index: int, value: int) -> None:
    """`flags[index] = value` (int32), when all before it in the current stream is done and seen."""
    _call("cuStreamWriteValue32_v2", flags, index, value, _FENCED)


def wait(flags: Tensor, index: int, value: int) -> None:
    """What is next in the current stream comes when `flags[index]` (int32) is `value` or more."""
    _call("cuStreamWaitValue32_v2", flags, index, value, _AT_LEAST)


def _call(name: str, flags: Tensor, index: int, value: int, mode: int) -> None:
    status = getattr(_driver(), name)(
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        ctypes.c_uint64(flags.data_ptr() + index * flags.element_size()),
        ctypes.c_uint32(value),
        ctypes.c_uint(mode),
    )
    if status:
        raise RuntimeError(f"{name} failed with CUDA error {status}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
