"""What a training run shows: a progress bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Log = bool | Callable[[str], None]
_LINES = 20  # a run prints about this many lines
_WINDOW = 10  # steps over which the speed is averaged


class TrainingProgress:
    """Shows step, loss and speed of a run of `steps` steps that starts after step `done`.

    log: True for a bar on stderr if that is a terminal, or else lines there; a function to give
    lines to; False for nothing. `work` and `unit` are what a step gets through: 2048 "tokens".
    """

    def __init__(self, log: Log, done: int, steps: int, work: int, unit: str) -> None:
        self._log = log
        self._first = done + 1
        self._last = done + steps
        self._work = work
        self._unit = unit
        self._every = max(1, steps // _LINES)
        self._ends = deque([time.perf_counter()], maxlen=_WINDOW + 1)
        self._bar = _bar(done, self._last) if log is True and sys.stderr.isatty() else None

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, loss: float) -> None:
        """Step `step` (from 1) has ended with `loss`."""
        self._ends.append(time.perf_counter())
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        speed = f"{self._work / seconds:,.0f} {self._unit}/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, loss=f"{loss:.4f}", speed=speed)
        elif self._log and ((step - self._first) % self._every == 0 or step == self._last):
            show(self._log, f"step {step}/{self._last}  loss {loss:.4f}  {speed}")

    def skipped(self, step: int, norm: float, count: int) -> None:
        """Step `step` has changed no parameter: it is the `count`-th such step."""
        self.note(f"step {step} skipped: the gradients' norm is {norm}; {count} skipped in all")

    def note(self, line: str) -> None:
        """Show a line beside the progress."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            show(self._log, line)


def show(log: Log, line: str) -> None:
    """A line to stderr, or to a function."""
    if log is True:
        print(line, file=sys.stderr, flush=True)
    elif log:
        log(line)


def _bar(done: int, last: int) -> Progress:
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    bar.add_task("train", total=last, completed=done, loss="-", speed="-")
    return bar
