"""Times the ways of computing one call, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Way = Callable[[], Any]
ROUNDS = 9
_FLUSH_BYTES = 256 * 2**20  # more than any L2 holds


def seconds_of(
    ways: Mapping[str, Way], device: torch.device, rounds: int = ROUNDS
) -> dict[str, float]:
    """The median time of each way over the rounds, each of which runs all of them once.

    The first round is not counted. On CUDA by events of the device, with what the call before left
    in L2 written over, as other calls of a step do.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if _is_cuda(device) else None
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name, way in ways.items():
            seconds = _clocked(way) if flush is None else _by_events(way, flush)
            if number >= 0:
                found[name].append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _clocked(way: Way) -> float:
    start = time.perf_counter()
    result = way()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _by_events(way: Way, flush: torch.Tensor) -> float:
    start, end = (_event() for _ in range(2))
    flush.zero_()
    start.record()
    result = way()
    end.record()
    end.synchronize()
    del result
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
