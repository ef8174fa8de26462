"""The processes of a run: ranks, those that wait to be one, and those that were given up."""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msc.runtime.recovery.process import Worker

TICK_S = 0.05
"""How often processes are looked at."""
_CLOSING_S = 0.002
"""From closing its files to its end a process takes so long."""
_DOOMED_S = 2.0
"""How long a rank that has failed may take to say so to the user, and end."""
_END_S = 10.0
"""How long processes that were asked to end may take."""

Message = tuple[Worker, dict[str, Any], list[int]]


class Pool:
    """Starts processes, hears them, and leaves none behind.

    modules: what a process imports that waits to be a rank.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._died = 0  # before they could wait
        self._selector = selectors.DefaultSelector()
        self._standbys: list[Worker] = []
        self._doomed: dict[Worker, float] = {}  # until when they may say what failed
        self._left: list[Worker] = []  # ended; something that they have started may be there

    def new(self) -> Worker:
        """Start a process."""
        worker = Worker()
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def take(self) -> tuple[Worker, bool]:
        """A process for a rank, and whether it has waited: the warmest that does, or a new one."""
        worker = max(self._standbys, key=lambda each: each.warm, default=None)
        if worker is None:
            return self.new(), False
        self._standbys.remove(worker)
        return worker, True

    def listen(self, file: Any) -> None:
        """Let `heard` also end its wait when `file` can be read."""
        self._selector.register(file, selectors.EVENT_READ)

    def ignore(self, file: Any) -> None:
        """Take back `listen`."""
        self._selector.unregister(file)

    def stand_by(self, count: int) -> None:
        """Let `count` processes wait, less those that have ended before they could."""
        while len(self._standbys) < count - self._died:
            worker = self.new()
            worker.stand_by(self._modules)
            self._standbys.append(worker)

    def is_standby(self, worker: Worker) -> bool:
        """Whether it waits to be a rank."""
        return worker in self._standbys

    def heard(self) -> Iterator[Message]:
        """What processes tell, with the files that come along; waits a tick for the first."""
        closing = False
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                continue
            received = key.data.channel.receive()
            if received is None:
                self.forget(key.data)
                closing = True
            else:
                yield (key.data, *received)
        if closing:
            time.sleep(_CLOSING_S)

    def forget(self, worker: Worker) -> None:
        """Hear no more of a process."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel)

    def doom(self, worker: Worker) -> None:
        """Give a process up that has yet to say what failed."""
        self._doomed[worker] = time.monotonic() + _DOOMED_S

    def is_doomed(self, worker: Worker) -> bool:
        """Whether it was given up."""
        return worker in self._doomed

    def part_with(self, worker: Worker) -> None:
        """A process is no rank any more: kill it, unless it has yet to say what failed."""
        if worker not in self._doomed:
            self._bury(worker)

    def destroy(self, worker: Worker) -> None:
        """Kill a rank and all that it has started, so that nothing of it is written any more."""
        self._doomed.pop(worker, None)
        self._bury(worker)
        worker.end_children(signal.SIGKILL)

    def reap(self) -> tuple[list[Worker], list[Worker]]:
        """Look after processes that are no ranks.

        Which standbys have ended, where one that was not even warm has no successor, as that would
        end alike; and which of those that were given up are gone.
        """
        now = time.monotonic()
        over = [
            worker
            for worker, deadline in self._doomed.items()
            if worker.poll() is not None or now > deadline
        ]
        for worker in over:
            del self._doomed[worker]
            self._bury(worker)
        lost = [worker for worker in self._standbys if worker.poll() is not None]
        for worker in lost:
            self._standbys.remove(worker)
            self._died += not worker.warm
            self._bury(worker)
        self._left = [worker for worker in self._left if worker.children()]
        return lost, over

    def end(self, ranks: Sequence[Worker]) -> None:
        """End every process; those that write a checkpoint may finish."""
        running = [worker for worker in ranks if worker.poll() is None]
        for worker in running:
            worker.ask_to_end()
        end = time.monotonic() + _END_S
        _wait(lambda: any(worker.poll() is None for worker in running), end)
        for worker in dict.fromkeys((*ranks, *self._standbys, *self._doomed)):
            self._bury(worker)
        for worker in self._left:
            worker.end_children(signal.SIGTERM)  # what writes a checkpoint does not heed it
        _wait(lambda: any(worker.children() for worker in self._left), end)
        for worker in self._left:
            worker.end_children(signal.SIGKILL)
        self._selector.close()

    def _bury(self, worker: Worker) -> None:
        worker.kill()
        self.forget(worker)
        worker.channel.close()
        if worker.children():
            self._left.append(worker)


def _wait(busy: Callable[[], bool], end: float) -> None:
    while busy() and time.monotonic() < end:
        time.sleep(TICK_S / 5)
