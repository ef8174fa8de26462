"""Queues on CUDA: a stream that computes and one that copies, per rank.

Copies between devices run on copy engines, and flags are written and waited for by the streams
(`stream_memory`): neither takes processors from the kernel that waits for them. Copies inside one
device may take some, which kernels of virtual ranks leave them
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
from msc.runtime.fused_kernels import stream_memory
from msc.runtime.fused_kernels.queues import Queues, Together


@dataclass(frozen=True)
class Driver:
    """What is asked of CUDA: streams as torch has them, and what is put into them.

    on: makes a stream the current one inside a block. The others act on the current stream.
    """

    current: Callable[[], Any] = torch.cuda.current_stream
    stream: Callable[[], Any] = torch.cuda.Stream
    on: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream
    write: Callable[[Tensor, int, int], None] = stream_memory.write
    wait: Callable[[Tensor, int, int], None] = stream_memory.wait
    launch: Callable[[Kernel, Mapping[str, Any]], None] = launch.launch


class CudaQueues:
    """The queues of one rank."""

    def __init__(self, driver: Driver, position: int, main: Any, beside: Any) -> None:
        self.position = position
        self._driver = driver
        self._main = main
        self._beside = beside

    def write(self, destination: Tensor, source: Tensor) -> None:
        """See `Queues`, as of the other methods."""
        with self._driver.on(self._main):
            destination.copy_(source, non_blocking=True)

    def tell(self, flags: Tensor, index: int, value: int) -> None:
        with self._driver.on(self._main):
            self._driver.write(flags, index, value)

    def follow(self) -> None:
        self._beside.wait_stream(self._main)

    def wait(self, flags: Tensor, index: int, value: int) -> None:
        with self._driver.on(self._beside):
            self._driver.wait(flags, index, value)

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


def process_together(position: int, driver: Driver | None = None) -> Together:
    """The queues of this process's rank: the current stream, and one beside it for all calls."""
    driver = driver or Driver()
    beside = driver.stream()

    @contextmanager
    def together() -> Iterator[Sequence[Queues]]:
        yield [CudaQueues(driver, position, driver.current(), beside)]

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
        for main, _ in streams:
            main.wait_stream(current)
        yield [CudaQueues(driver, position, *own) for position, own in enumerate(streams)]
        for main, beside in streams:
            current.wait_stream(main)
            current.wait_stream(beside)

    return together
