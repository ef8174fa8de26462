"""A stream of copies, waits and signals of one rank, beside or between its kernels."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from msc.testing.interpreter.memory import Memory
from msc.testing.interpreter.tasks import Launch, Task

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CopyEngine:
    """Everything in it happens in order.

    A copy becomes visible piece by piece, in any order; a signal after it comes after all of it.
    switch: lets others run; poll: the same, until memory changes.
    """

    PIECES = 4

    def __init__(
        self,
        task: Task,
        memory: Memory,
        rng: random.Random,
        switch: Callable[[], None],
        poll: Callable[[Task], None],
    ) -> None:
        self._task, self._memory, self._rng = task, memory, rng
        self._switch, self._poll = switch, poll

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """destination[:] = source; both contiguous, of one dtype and size."""
        flat, values = destination.view(-1), source.reshape(-1).view(_BITS[source.element_size()])
        starts = list(range(0, flat.numel(), max(1, flat.numel() // self.PIECES)))
        ends = [*starts[1:], flat.numel()]
        pieces = list(zip(starts, ends, strict=True))
        self._rng.shuffle(pieces)
        for start, end in pieces:
            offsets = np.arange(start, end, dtype=np.uint64) * np.uint64(flat.element_size())
            addresses = np.uint64(flat.data_ptr()) + offsets
            self._memory.write_now(self._task.view, addresses, values[start:end].numpy().copy())
            self._switch()

    def signal(self, flags: torch.Tensor, index: int, value: int) -> None:
        """flags[index] = value, after everything before it."""
        self._switch()
        flags[index] = value
        self._memory.version += 1

    def wait(self, flags: torch.Tensor, index: int, at_least: int) -> None:
        """Until flags[index] has reached a value."""
        while int(flags[index]) < at_least:
            self._poll(self._task)
        self._memory.begin(self._task.view)

    def wait_launch(self, launch: Launch) -> None:
        """Until an entry of a stream has ended, as with an event."""
        while not launch.done:
            self._poll(self._task)
