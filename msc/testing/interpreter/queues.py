"""Fused kernels of a program in the interpreter: all ranks of a group at once, seeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from msc.codegen.kernels.description import Kernel
from msc.runtime.fused_kernels.queues import Together
from msc.testing.interpreter.copy_engine import CopyEngine
from msc.testing.interpreter.executor import Executor

Work = Callable[[CopyEngine], None]


def interpreted_together(size: int) -> Together:
    """Queues of so many ranks; each call has a schedule of its own, the same one in every run."""
    seeds = count(1)

    def together() -> AbstractContextManager[Sequence[InterpretedQueues]]:
        return _running(Executor(next(seeds), size), size)

    return together


@contextmanager
def _running(executor: Executor, size: int) -> Iterator[Sequence[InterpretedQueues]]:
    ranks = [InterpretedQueues(executor, position) for position in range(size)]
    yield ranks
    for queues in ranks:
        queues.close()
    executor.run()


class InterpretedQueues:
    """The queues of one rank: a stream of the executor, and a copy engine beside it."""

    def __init__(self, executor: Executor, position: int) -> None:
        self.position = position
        self._executor = executor
        self._main: list[Work] = []
        self._beside: list[Work] = []

    def write(self, destination: Tensor, source: Tensor) -> None:
        """See `Queues`, as of the other methods."""
        self._main.append(lambda engine: engine.copy(destination, source))

    def tell(self, flags: Tensor, index: int, value: int) -> None:
        self._main.append(lambda engine: engine.signal(flags, index, value))

    def follow(self) -> None:
        launch = self._executor.copies(self.position, "writes", _all(self._main))
        self._main = []
        self._beside.append(lambda engine: engine.wait_launch(launch))

    def wait(self, flags: Tensor, index: int, value: int) -> None:
        self._beside.append(lambda engine: engine.wait(flags, index, value))

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self._beside.append(lambda engine: engine.copy(destination, source))

    def raise_flag(self, flags: Tensor, index: int, value: int) -> None:
        self._beside.append(lambda engine: engine.signal(flags, index, value))

    def launch(self, kernel: Kernel, values: Mapping[str, Any]) -> None:
        assert not self._main  # whoever writes lets the copies follow
        self._executor.launch(self.position, kernel, values)

    def join(self) -> None:
        pass  # the call ends when all copies have

    def close(self) -> None:
        """No more copies: those that there are can begin."""
        if self._beside:
            self._executor.engine(self.position, "copies", _all(self._beside))


def _all(works: Sequence[Work]) -> Work:
    def run(engine: CopyEngine) -> None:
        for work in works:
            work(engine)

    return run
