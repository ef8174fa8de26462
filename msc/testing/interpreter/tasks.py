"""What an executor runs: coroutines of ranks, and the entries of a rank's stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from greenlet import greenlet

from msc.testing.interpreter.memory import View


class Task(greenlet):  # type: ignore[misc]  # greenlet has no types
    """A coroutine of one rank: a program of a kernel, or a copy engine."""

    def __init__(self, name: str, rank: int, run: Callable[[], None]) -> None:
        super().__init__(run)
        self.name, self.rank = name, rank
        self.view = View()
        self.grid: tuple[int, ...] | None = None
        self.index: tuple[int, ...] = ()
        self.slow = False
        """Whether it runs only when no other task can."""
        self.polled_at = -1
        """The version of memory at which it last found nothing new."""
        self.polled = 0
        """The address of the flag that it last asked for."""


@dataclass
class Launch:
    """An entry of a rank's stream: its tasks run after those of the entries before it."""

    rank: int
    waiting: list[Task]
    running: int = 0
    started: bool = False

    @property
    def done(self) -> bool:
        """Whether all of its programs have ended."""
        return self.started and not self.waiting and not self.running
