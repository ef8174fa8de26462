"""Queues on CUDA: a stream that computes and one that copies, per rank.

Copies between devices run on copy engines, which take no processors from the kernel that waits for
them; copies inside one device may take some, which kernels of virtual ranks leave them
(`msc.codegen.kernel_calls.fused_collectives.SPARE`).

This has not run on a GPU. Tests run it with streams that do everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernels import launch
from msc.codegen.kernels.description import Kernel
from msc.ir.torch_private import SymmetricMemory, write_on_stream
from msc.runtime.fused_kernels.queues import Queues, Together


@dataclass(frozen=True)
class Driver:
    """What is asked of CUDA: streams and events as torch has them.

    on: makes a stream the current one inside a block. write: writes a flag on the current stream.
    """

    current: Callable[[], Any] = torch.cuda.current_stream
    stream: Callable[[], Any] = torch.cuda.Stream
    event: Callable[[], Any] = torch.cuda.Event
    on: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream
    write: Callable[[Tensor, int, int], None] = write_on_stream
    launch: Callable[[Kernel, Mapping[str, Any]], None] = launch.launch


class CudaQueues:
    """The queues of one rank, all but how ranks tell each other that their rows are there."""

    def __init__(self, driver: Driver, position: int, main: Any, beside: Any) -> None:
        self.position = position
        self._driver = driver
        self._main = main
        self._beside = beside

    def write(self, destination: Tensor, source: Tensor) -> None:
        """See `Queues`, as of the other methods."""
        with self._driver.on(self._main):
            destination.copy_(source, non_blocking=True)

    def follow(self) -> None:
        self._beside.wait_stream(self._main)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with self._driver.on(self._beside):
            destination.copy_(source, non_blocking=True)

    def raise_flag(self, flags: Tensor, index: int, value: int) -> None:
        with self._driver.on(self._beside):
            self._driver.write(flags, index, value)

    def launch(self, kernel: Kernel, values: Mapping[str, Any]) -> None:
        with self._driver.on(self._main):
            self._driver.launch(kernel, values)

    def join(self) -> None:
        self._main.wait_stream(self._beside)


class ProcessQueues(CudaQueues):
    """Of the one rank of this process; ranks signal each other on their devices."""

    def __init__(
        self, driver: Driver, position: int, main: Any, beside: Any, memory: SymmetricMemory
    ) -> None:
        super().__init__(driver, position, main, beside)
        self._memory = memory

    def announce(self) -> None:
        with self._driver.on(self._main):
            for rank in range(len(self._memory.parts)):
                if rank != self.position:
                    self._memory.put_signal(rank)

    def await_rows_of(self, source: int) -> None:
        with self._driver.on(self._beside):
            self._memory.wait_signal(source)


class VirtualQueues(CudaQueues):
    """Of one of several ranks on one device; `announced[rank]` is an event."""

    def __init__(
        self, driver: Driver, position: int, main: Any, beside: Any, announced: Sequence[Any]
    ) -> None:
        super().__init__(driver, position, main, beside)
        self._announced = announced

    def announce(self) -> None:
        self._announced[self.position].record(self._main)

    def await_rows_of(self, source: int) -> None:
        self._beside.wait_event(self._announced[source])


def process_together(
    memory: SymmetricMemory, position: int, driver: Driver | None = None
) -> Together:
    """The queues of this process's rank: the current stream, and one beside it for all calls."""
    driver = driver or Driver()
    beside = driver.stream()

    @contextmanager
    def together() -> Iterator[Sequence[Queues]]:
        yield [ProcessQueues(driver, position, driver.current(), beside, memory)]

    return together


def virtual_together(size: int, driver: Driver | None = None) -> Together:
    """The queues of so many ranks on one device: two streams each, between the current one's work.

    They run at the same time, so kernels must leave room for each other.
    """
    driver = driver or Driver()
    streams = [(driver.stream(), driver.stream()) for _ in range(size)]

    @contextmanager
    def together() -> Iterator[Sequence[Queues]]:
        current = driver.current()
        announced = [driver.event() for _ in range(size)]
        for main, _ in streams:
            main.wait_stream(current)
        yield [
            VirtualQueues(driver, position, main, beside, announced)
            for position, (main, beside) in enumerate(streams)
        ]
        for main, beside in streams:
            current.wait_stream(main)
            current.wait_stream(beside)

    return together
