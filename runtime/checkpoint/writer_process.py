"""The trainer's side of the writing process: starts it, asks it, hears it, restarts it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msc.ir.errors import CommunicationError
from msc.runtime.checkpoint.arena import Arena
from msc.runtime.checkpoint.marks import SLOTS

Log = Callable[[str], None]
Absent = Callable[[str, int], None]
"""`absent(attempt, step)`: this rank's part of the step will never come."""
_MODULE = "msc.runtime.checkpoint.writer"
_LIVES = 3  # processes in a row that may die at one save before it is given up


@dataclass
class _Save:
    """A step that was handed over: its slot is None once it is written."""

    attempt: str
    step: int
    slot: int | None
    request: Mapping[str, Any]
    deaths: int = 0


class WriterProcess:
    """Writes saves in the order in which they are handed over.

    plan: what the process needs to know (see `writer.serve`); commits: whether this rank's process
    commits steps, so that a save is over only then. Thread-safe.

    written, committed, failed: the newest step whose part is durable, that is complete, and that
    could not be written; of ranks that do not commit, the second stays None.
    """

    def __init__(
        self,
        arena: Arena,
        plan: Mapping[str, Any],
        commits: bool,
        log: Log,
        absent: Absent,
        wait: bool = True,
    ) -> None:
        self.committed: int | None = None
        self.written: int | None = None
        self.failed: int | None = None
        self.restarts = 0
        self._arena = arena
        self._plan = {**plan, "slots": SLOTS, "stride": arena.stride, "size": arena.size}
        self._commits = commits
        self._log = log
        self._absent = absent
        self._saves: list[_Save] = []
        self._reserved: set[int] = set()
        self._newest: int | None = None
        self._change = threading.Condition(threading.RLock())
        self._closing = False
        self._ready = False
        self._stillborn = 0  # processes in a row that died before they were ready
        with self._change:
            self._start()
            if wait:
                self._change.wait_for(lambda: self._ready or self.broken)
        if wait and self.broken:
            raise CommunicationError(
                "The process that writes checkpoints cannot start; what it printed stands above. "
                f"It is started as: {sys.executable} -m {_MODULE}"
            )

    @property
    def broken(self) -> bool:
        """Whether no process can be started any more: nothing is saved."""
        return self._stillborn >= _LIVES

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def take_slot(self, wait: bool) -> int | None:
        """A slot that nothing is written from; None if there is none and `wait` is false.

        Of two it is the older one: the newest snapshot stays until the next is complete.
        """
        with self._change:
            while not self.broken:
                busy = {each.slot for each in self._saves} | self._reserved
                free = [slot for slot in range(SLOTS) if slot not in busy]
                if free:
                    slot = next((each for each in free if each != self._newest), free[0])
                    self._reserved.add(slot)
                    return slot
                if not wait:
                    return None
                self._change.wait()
            return None

    def save(self, step: int, slot: int, request: Mapping[str, Any]) -> None:
        """Write `slot` as the part of `step`; `request` has what is committed with it."""
        with self._change:
            self._reserved.discard(slot)
            self._newest = slot
            if self.broken:
                self._log(f"checkpoint of step {step} was not saved: no process can be started")
                self._absent(self._plan["attempt"], step)
                return
            self._saves.append(_Save(self._plan["attempt"], step, slot, request))
            self._ask(self._saves[-1])

    def begin(self, attempt: str) -> None:
        """The ranks have met again: saves from now on are of another attempt."""
        with self._change:
            self._plan["attempt"] = attempt
            self._send({"attempt": attempt})

    def skip(self, step: int) -> None:
        """This step is not saved; the other ranks need not wait for it."""
        with self._change:
            self._absent(self._plan["attempt"], step)

    def keep(self, slot: int) -> None:
        """What this slot holds is the newest that counts: the next save goes into the other."""
        with self._change:
            self._newest = slot

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all saves are over; whether they are."""
        with self._change:
            return self._change.wait_for(lambda: not self._saves, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish all saves and end the process; after `timeout_s` it goes on alone."""
        self.flush(timeout_s)
        with self._change:
            self._closing = True
            self._outbox.put(None)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._log("the process that writes checkpoints is still writing; it ends by itself")
            return
        self._reader.join()

    def _start(self) -> None:
        self._outbox = queue.SimpleQueue[bytes | None]()
        command = [sys.executable, "-m", _MODULE, str(self._arena.handle)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._arena.handle],
        )
        feeder = threading.Thread(
            target=_feed, args=(self._process, self._outbox), name="msc-saves", daemon=True
        )
        feeder.start()
        self._reader = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._reader.start()
        attempts = [each.attempt for each in self._saves]
        self._send({**self._plan, "attempt": (attempts or [self._plan["attempt"]])[0]})
        for save in self._saves:
            self._ask(save)

    def _ask(self, save: _Save) -> None:
        place = {"attempt": save.attempt, "step": save.step, "slot": save.slot}
        self._send({**place, **save.request})

    def _send(self, message: Mapping[str, Any]) -> None:
        """Ask the process that runs now; who asks does not wait for it to listen."""
        self._outbox.put(json.dumps(message).encode() + b"\n")

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            report = json.loads(line)
            with self._change:
                self._hear(report)
                self._change.notify_all()
        process.stdout.close()
        code = process.wait()
        with self._change:
            if not self._closing:
                self._outbox.put(None)
                self._died(code)
            self._change.notify_all()

    def _hear(self, report: Mapping[str, Any]) -> None:
        event, step = report["event"], report.get("step")
        which = (report.get("attempt"), step)
        save = next((each for each in self._saves if (each.attempt, each.step) == which), None)
        if event == "ready":
            self._ready = True
            self._stillborn = 0
        elif event == "written":
            self.written = step
        elif event == "committed":
            self.committed = step
            self._log(f"checkpoint of step {step} is complete")
        elif event == "failed":
            self.failed = step
            self._log(
                f"checkpoint of step {step} was not saved: {report['error']}; training goes on"
            )
        elif event == "abandoned":
            self._log(f"checkpoint of step {step} stays incomplete: {report['error']}")
        elif event == "warning":
            self._log(f"checkpoints: {report['error']}")
        if save is None:
            return
        if event == "failed":
            self._absent(save.attempt, save.step)
        if event == "written" and self._commits:
            save.slot = None
        elif event in ("written", "committed", "failed", "abandoned"):
            self._saves.remove(save)

    def _died(self, code: int) -> None:
        self.restarts += 1
        self._stillborn += not self._ready
        self._ready = False
        if self._saves:
            self._saves[0].deaths += 1
            if self._saves[0].deaths >= _LIVES or self.broken:
                lost = self._saves.pop(0)
                self._absent(lost.attempt, lost.step)
                self._log(
                    f"checkpoint of step {lost.step} was not saved: {lost.deaths} writing "
                    f"processes have died at it, the last with exit code {code}; training goes on"
                )
        if self.broken:
            for lost in self._saves:
                self._absent(lost.attempt, lost.step)
            self._saves.clear()
            self._log(
                f"the process that writes checkpoints dies at its start (exit code {code}): "
                "NOTHING IS SAVED from here on; training goes on"
            )
            return
        self._log(f"the process that writes checkpoints died (exit code {code}); started again")
        self._start()


def _feed(process: subprocess.Popen[bytes], outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Write what is put into `outbox` to a process, and close its stdin after a None.

    Of a process that has died nothing is told here: `_listen` starts another, which is asked again.
    """
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as stdin:
        while (data := outbox.get()) is not None:
            stdin.write(data)
            stdin.flush()
