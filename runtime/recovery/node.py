"""The agent of a node: its processes, their rings and their snapshots.

It decides nothing. The controller's commands are carried out (`NodeAgent.obey`), and what is seen
goes into `NodeAgent.reports`; both are JSON, so that the controller may be in another process.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msc.runtime.recovery.arenas import HeldArena
from msc.runtime.recovery.journal import Journal
from msc.runtime.recovery.pool import TICK_S, Pool
from msc.runtime.recovery.process import Worker
from msc.runtime.recovery.rings import Rings, what_it_did

STOPPED_S = 2.4
"""How long a process may be stopped before it is frozen."""
_PULSE_S = 0.1
"""Between two looks at how far ranks are."""


@dataclass
class LocalRank:
    """A rank that this node has.

    process: its number in the run; trainer: which Trainer of its script it has made last; arena:
    its snapshots, until it has its state and they count; over: whether its end was told; seen: when
    it was last known to run; stopped: since when it is stopped.
    """

    rank: int
    process: int
    worker: Worker
    trainer: int = 0
    arena: HeldArena | None = None
    over: bool = False
    seen: float = field(default_factory=time.monotonic)
    stopped: float | None = None

    def offer(self, arena: HeldArena) -> None:
        """Take the snapshots of a Trainer: a replacement begins with the first, and so can use
        those of no other."""
        self.withdraw()
        if self.trainer > 1:
            arena.close()
        else:
            self.arena = arena

    def withdraw(self) -> None:
        """Give up snapshots that do not count yet."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class NodeAgent:
    """Has the ranks of one node.

    arguments: the script and its own; folder: of the run; standbys: how many processes wait, with
    `modules` imported, to take a rank; recovers: whether ranks know of the agent.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        standbys: int = 0,
        modules: Sequence[str] = (),
        recovers: bool = True,
    ) -> None:
        self.reports: deque[dict[str, Any]] = deque()
        self._arguments = list(arguments)
        self._folder = folder
        self._recovers = recovers
        self._pool = Pool(standbys, modules)
        self._journal = Journal.new()
        self._ranks: dict[int, LocalRank] = {}
        self._tries: dict[int, LocalRank] = {}  # by process; they wait to be ranks
        self._arenas: dict[int, HeldArena] = {}
        self._rings = Rings()
        self._last_words: dict[Worker, int] = {}
        self._told: Any = None
        self._next_pulse = 0.0
        self._commands: dict[str, Callable[..., None]] = {
            "start": self._start,
            "stop": self._stop,
            "try": self._try,
            "drop": self._drop,
            "adopt": self._adopt,
            "grow": self._grow,
            "leave": self._leave,
            "join": self._join,
            "forget snapshots": self._forget_snapshots,
            "stand by": self._pool.stand_by,
            "read rings": self._read_rings,
        }

    def obey(self, command: str, facts: Mapping[str, Any]) -> None:
        """Do what the controller says."""
        self._commands[command](**facts)

    def turn(self) -> None:
        """Hear and look after all processes; takes a tick if nothing happens."""
        for worker, message, files in self._pool.heard():
            self._hear(worker, message, files)
        self._reap()
        if self._recovers:
            self._look()

    def end(self) -> None:
        """End all processes."""
        self._pool.end([each.worker for each in self._all()])
        for rank in self._all():
            rank.withdraw()
        self._forget_snapshots()

    # -- commands

    def _start(self, rank: int, process: int, environment: Mapping[str, str]) -> None:
        """Give a rank to a process, in place of the one that has it."""
        before = self._ranks.get(rank)
        if before is not None:
            self._give_up(before)
        worker, stood_by = self._pool.take()
        self._ranks[rank] = LocalRank(rank, process, worker)
        journal = self._journal.handle if self._recovers else None
        worker.start(self._arguments, environment, self._folder, journal)
        self._report("started", rank=rank, process=process, stood_by=stood_by)

    def _all(self) -> list[LocalRank]:
        return [*self._ranks.values(), *self._tries.values()]

    def _stop(self, rank: int) -> None:
        """A rank is not here any more."""
        self._rings.forget(rank)
        self._give_up(self._ranks.pop(rank))

    def _give_up(self, rank: LocalRank) -> None:
        self._pool.part_with(rank.worker)
        rank.withdraw()

    def _try(self, rank: int, process: int, environment: Mapping[str, str]) -> None:
        """Start a process that may become a rank later."""
        worker = self._pool.new()
        self._tries[process] = LocalRank(rank, process, worker)
        worker.start(self._arguments, environment, self._folder, self._journal.handle)

    def _drop(self, process: int) -> None:
        self._give_up(self._tries.pop(process))

    def _adopt(self, process: int) -> None:
        """A process that was tried is a rank now."""
        found = self._tries.pop(process)
        self._ranks[found.rank] = found

    def _grow(self, rank: int) -> None:
        self._ranks[rank].worker.channel.send("grow", wait=False)

    def _leave(self, rank: int) -> None:
        self._ranks[rank].worker.channel.send("leave", wait=False)

    def _join(
        self,
        number: int,
        host: str,
        port: int,
        step: int | None,
        slots: Sequence[int],
        last: int | None,
        reached: int,
        may_grow: bool,
    ) -> None:
        """All ranks form a generation; with the state of `step`, which is in these slots."""
        source = None if step is None else {"step": step, "slots": list(slots)}
        files = [] if step is None else [self._arenas[r].handle for r in sorted(self._arenas)]
        for each in self._ranks.values():
            each.worker.channel.send(
                "join",
                files,
                number=number,
                host=host,
                port=port,
                source=source,
                last=last,
                reached=reached,
                may_grow=may_grow,
            )

    def _forget_snapshots(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _read_rings(self) -> None:
        self._report("rings", rings=self._rings.all())

    # -- what processes do

    def _hear(self, worker: Worker, message: dict[str, Any], files: list[int]) -> None:
        event = message.pop("event")
        if self._pool.is_standby(worker):
            worker.warm = event == "warm"
            self._report("standby", pid=worker.pid)
            return
        rank = next((each for each in self._all() if each.worker is worker), None)
        if rank is None or self._pool.is_doomed(worker):
            for handle in files:
                os.close(handle)
            return
        if event == "ring":
            self._rings.watch(rank.rank, Path(message["ring"]), Path(message["schedule"]))
        elif event == "arena":
            rank.offer(HeldArena(files[0], message["marks"]))
        else:
            if event == "ready":
                rank.trainer = message["trainer"]
            elif event == "restored":
                self._keep(rank)
            elif event == "failed" and self._recovers:
                self._pool.doom(worker)
                self._last_words[worker] = rank.process
            self._tell(rank, "told", what=event, facts=message)

    def _keep(self, rank: LocalRank) -> None:
        """The snapshots of a rank count from now on, in place of those that there were."""
        if rank.arena is not None:
            old = self._arenas.get(rank.rank)
            if old is not None:
                old.close()
            self._arenas[rank.rank], rank.arena = rank.arena, None

    def _reap(self) -> None:
        now = time.monotonic()
        for rank in self._all():
            code = rank.worker.poll()
            before, rank.seen = rank.seen, now
            if code is None or rank.over or self._pool.is_doomed(rank.worker):
                continue
            rank.over = True
            self._tell(rank, "exit", code=code, detect_s=now - before)
        lost, over = self._pool.reap()
        for worker in over:
            self._report("silent", process=self._last_words.pop(worker))
        for _ in range(lost):
            self._report("standby lost")

    def _look(self) -> None:
        """Find who is frozen, and say how far the others are."""
        now = time.monotonic()
        for rank in self._all():
            if rank.over or not rank.worker.stopped():
                rank.stopped = None
            elif rank.stopped is None:
                rank.stopped = now
            elif now - rank.stopped > STOPPED_S:
                rank.stopped = None
                self._tell(rank, "frozen", detect_s=STOPPED_S + 2 * TICK_S)
        if now >= self._next_pulse:
            self._next_pulse = now + _PULSE_S
            news = self._rings.news()
            if news:
                self._report("steps", steps=list(news.items()))

    # -- reports

    def _report(self, event: str, **facts: Any) -> None:
        self.reports.append({"event": event, **facts})

    def _tell(self, rank: LocalRank, event: str, **facts: Any) -> None:
        """Report what happened to a rank, with what its ring says that it did.

        What snapshots there are is known before: the controller may decide by it at once.
        """
        self._tell_snapshots()
        step, doing = None, ""
        if event != "told" or facts["what"] in ("failed", "restart"):
            view = self._rings.view(rank.rank)
            if view is not None and view.pid == rank.worker.pid:
                step, doing = view.step, what_it_did(view)
        self._report(event, rank=rank.rank, process=rank.process, step=step, doing=doing, **facts)

    def _tell_snapshots(self) -> None:
        held = [
            (rank, [(slot, mark.generation, mark.step) for mark, slot in arena.steps().items()])
            for rank, arena in sorted(self._arenas.items())
        ]
        if (held, self._journal.steps) != self._told:
            self._told = held, self._journal.steps
            self._report("snapshots", held=held, reached=self._journal.steps)
