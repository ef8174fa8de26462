"""The agent of a node: its processes, their rings and their snapshots.

It decides nothing. The controller's commands are carried out (`NodeAgent.obey`), and what is seen
goes into `NodeAgent.reports`; both are JSON, so that the controller may be in another process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msc.runtime.checkpoint.marks import Mark
from msc.runtime.recovery.arenas import HeldArena
from msc.runtime.recovery.copier import Copier
from msc.runtime.recovery.journal import Journal
from msc.runtime.recovery.link import send_join
from msc.runtime.recovery.members import Stage
from msc.runtime.recovery.pool import TICK_S, Pool
from msc.runtime.recovery.process import Worker
from msc.runtime.recovery.rings import Rings, what_it_did
from msc.runtime.recovery.shelf import Book, Shelf
from msc.runtime.recovery.transfer import Address, Client, Server

STOPPED_S = 2.4
"""How long a process may be stopped before it is frozen."""
_PULSE_S = 0.1
"""Between two looks at how far ranks are."""


@dataclass
class LocalRank:
    """A rank that this node has.

    process: its number in the run; stage, trainer, fit, told: as the controller has them (see
    `Member`), for one that was started anew; arena: its snapshots, until it has its state and they
    count; code: its exit code, once that was told; seen: when it was last known to run; stopped:
    since when it is stopped.
    """

    rank: int
    process: int
    worker: Worker
    stage: Stage = Stage.STARTS
    trainer: int = 0
    fit: dict[str, Any] | None = None
    told: str = ""
    arena: HeldArena | None = None
    code: int | None = None
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
    `modules` imported, to take a rank; recovers: whether ranks know of the agent; token: of a run
    on several nodes, by which their agents get snapshots from each other.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        standbys: int = 0,
        modules: Sequence[str] = (),
        recovers: bool = True,
        token: str | None = None,
    ) -> None:
        self.reports: deque[dict[str, Any]] = deque()
        self.pool = Pool(modules)
        self.told: Any = None  # of snapshots
        self.variables: dict[str, str] = {}  # of this host, for all of its ranks
        self._arguments = list(arguments)
        self._folder = folder
        self._recovers = recovers
        self._standbys = standbys
        self._journal = Journal.new()
        self._ranks: dict[int, LocalRank] = {}
        self._tries: dict[int, LocalRank] = {}  # by process; they wait to be ranks
        self._shelf = Shelf()
        self._rings = Rings()
        self._last_words: dict[Worker, int] = {}
        self._next_pulse = 0.0
        self._memo: Any = None
        self._token = token or ""
        self._copier: Copier | None = None
        self._server: Server | None = None
        if token is not None:
            self._copier = Copier(self._shelf, token)
            self._server = Server(self._shelf, self._journal.handle, token)
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
            "stand by": self._stand_by,
            "copy": self._copy,
            "read rings": self._read_rings,
            "remember": self._remember,
        }

    @property
    def port(self) -> int | None:
        """Where snapshots are to be had."""
        return None if self._server is None else self._server.port

    @property
    def has_ranks(self) -> bool:
        """Whether it has any."""
        return bool(self._ranks)

    def obey(self, command: str, facts: Mapping[str, Any]) -> None:
        """Do what the controller says."""
        self._commands[command](**facts)

    def turn(self) -> None:
        """Hear and look after all processes; takes a tick if nothing happens."""
        for worker, message, files in self.pool.heard():
            self._hear(worker, message, files)
        self._reap()
        if self._recovers:
            self._look()

    def state(self) -> dict[str, Any]:
        """What a controller must know that was started anew."""
        return {
            "memo": self._memo,
            "ranks": [
                {
                    "rank": each.rank,
                    "process": each.process,
                    "stage": each.stage.value,
                    "trainer": each.trainer,
                    "fit": each.fit,
                    "told": each.told,
                    "code": each.code,
                }
                for each in self._ranks.values()
            ],
        }

    def give_up(self) -> None:
        """Kill all ranks, and forget the run: others have taken them."""
        for rank in self._all():
            self.pool.destroy(rank.worker)
            rank.withdraw()
            self._rings.forget(rank.rank)
        self._last_words.clear()
        self._ranks.clear()
        self._tries.clear()
        self._journal.clear()
        self._memo = None
        self.reports.clear()
        if self._copier is not None:
            self._copier.copy_from(None, ())
        self._shelf.clear(0)
        self.told = None

    def end(self) -> None:
        """End all processes."""
        self.pool.end([each.worker for each in self._all()])
        for rank in self._all():
            rank.withdraw()
        if self._server is not None:
            self._server.close()
        self._shelf.clear(0)

    # -- commands

    def _start(self, rank: int, process: int, environment: Mapping[str, str]) -> None:
        """Give a rank to a process, in place of the one that has it."""
        before = self._ranks.get(rank)
        if before is not None:
            self._part_with(before)
        worker, stood_by = self.pool.take()
        self._ranks[rank] = LocalRank(rank, process, worker)
        journal = self._journal.handle if self._recovers else None
        mine = {**environment, **self.variables}
        worker.start(self._arguments, mine, self._folder, journal)
        self._report("started", rank=rank, process=process, stood_by=stood_by)

    def _stop(self, rank: int) -> None:
        """A rank is not here any more."""
        self._rings.forget(rank)
        self._part_with(self._ranks.pop(rank))

    def _part_with(self, rank: LocalRank) -> None:
        self.pool.part_with(rank.worker)
        rank.withdraw()

    def _try(self, rank: int, process: int, environment: Mapping[str, str]) -> None:
        """Start a process that may become a rank later."""
        worker = self.pool.new()
        self._tries[process] = LocalRank(rank, process, worker)
        mine = {**environment, **self.variables}
        worker.start(self._arguments, mine, self._folder, self._journal.handle)

    def _drop(self, process: int | None) -> None:
        """Give up a process that was tried; None: all of them."""
        for number in list(self._tries) if process is None else [process]:
            self._part_with(self._tries.pop(number))

    def _adopt(self, rank: int, process: int) -> None:
        """A process that was tried is a rank now."""
        self._ranks[rank] = self._tries.pop(process)

    def _grow(self, rank: int) -> None:
        self._ranks[rank].worker.channel.send("grow", wait=False)

    def _leave(self, rank: int) -> None:
        self._ranks[rank].stage = Stage.LEAVES
        self._ranks[rank].worker.channel.send("leave", wait=False)

    def _join(
        self,
        source: Mapping[str, Any] | None,
        where: Sequence[tuple[int, str, int]],
        journal: Address | None,
        **generation: Any,
    ) -> None:
        """All ranks form a generation; those of this node are told.

        source: whose state they go on with; where: for each rank the agent that has it, for those
        that have none of it here; journal: the agent that has the losses, if this one has not.
        """
        books: dict[int, Book] = {}
        elsewhere = []
        if source is not None:
            mark = Mark(*source["mark"])
            source = {**source, "token": self._token}
            for rank, host, port in where:
                book = self._shelf.find(rank, mark)
                if book is not None:
                    books[rank] = book
                else:
                    elsewhere.append((rank, host, port))
            if journal is not None and self._journal.steps < mark.step:
                self._fetch_journal(journal)
        here = {rank: (book.handle, book.slot) for rank, book in books.items()}
        for each in self._ranks.values():
            each.stage = Stage.JOINS
            keeps = each.rank == min(self._ranks)
            facts = {**generation, "source": source, "keeps_journal": keeps}
            send_join(each.worker.channel, facts, here, elsewhere)
        for book in books.values():
            book.close()

    def _fetch_journal(self, address: Address) -> None:
        with contextlib.suppress(OSError):  # ranks lose what they tell of earlier steps, no more
            with Client(address, self._token) as client:
                self._journal.replace(client.journal())

    def _forget_snapshots(self, epoch: int) -> None:
        self._shelf.clear(epoch)
        self.told = None

    def _stand_by(self, least: int = 0) -> None:
        self.pool.stand_by(max(self._standbys, least))

    def _copy(self, address: Address | None, ranks: Sequence[int]) -> None:
        """Copy the snapshots of another node's ranks; here there is no need of any others."""
        if self._copier is not None:
            self._copier.copy_from(None if address is None else (address[0], address[1]), ranks)
        self._shelf.keep_own(self._ranks)

    def _read_rings(self) -> None:
        found = self._rings.all()
        self._tell_steps()  # who has got on meanwhile is not to blame
        self._report("rings", rings=found)

    def _remember(self, memo: Any) -> None:
        """Keep what a controller must know that is started anew."""
        self._memo = memo

    # -- what processes do

    def _hear(self, worker: Worker, message: dict[str, Any], files: list[int]) -> None:
        event = message.pop("event")
        if self.pool.is_standby(worker):
            worker.warm = event == "warm"
            self._report("standby", pid=worker.pid)
            return
        rank = next((each for each in self._all() if each.worker is worker), None)
        if rank is None or self.pool.is_doomed(worker):
            for handle in files:
                os.close(handle)
            return
        if event == "ring":
            self._rings.watch(rank.rank, Path(message["ring"]), Path(message["schedule"]))
        elif event == "arena":
            rank.offer(HeldArena(files[0], message["marks"]))
        else:
            self._note(rank, event, message)
            self._tell(rank, "told", what=event, facts=message)

    def _note(self, rank: LocalRank, event: str, facts: Mapping[str, Any]) -> None:
        """What a rank tells that this agent has to know itself."""
        if event == "ready":
            rank.trainer = facts["trainer"]
            rank.stage = Stage.WAITS
        elif event == "restored":
            rank.stage = Stage.RUNS
            if rank.arena is not None:  # its snapshots count, in place of those that there were
                self._shelf.put(rank.rank, rank.arena)
                rank.arena = None
        elif event == "fit":
            rank.fit = dict(facts)
        elif event == "fit over":
            rank.fit = None
        elif event == "failed":
            rank.told = rank.told or facts["error"]
            if self._recovers:
                self.pool.doom(rank.worker)
                self._last_words[rank.worker] = rank.process

    def _reap(self) -> None:
        now = time.monotonic()
        for rank in self._all():
            code = rank.worker.poll()
            before, rank.seen = rank.seen, now
            if code is None or rank.code is not None or self.pool.is_doomed(rank.worker):
                continue
            rank.code = code
            self._tell(rank, "exit", code=code, detect_s=now - before)
        lost, over = self.pool.reap()
        for worker in over:
            self._report("silent", process=self._last_words.pop(worker))
        for worker in lost:
            self._report("standby lost", warm=worker.warm)

    def _look(self) -> None:
        """Find who is frozen, and say how far the others are."""
        now = time.monotonic()
        for rank in self._all():
            if rank.code is not None or not rank.worker.stopped():
                rank.stopped = None
            elif rank.stopped is None:
                rank.stopped = now
            elif now - rank.stopped > STOPPED_S:
                rank.stopped = None
                self._tell(rank, "frozen", detect_s=STOPPED_S + 2 * TICK_S)
        if now >= self._next_pulse:
            self._next_pulse = now + _PULSE_S
            self._tell_steps()

    def _tell_steps(self) -> None:
        news = self._rings.news()
        if news:
            self._report("steps", steps=list(news.items()))

    def _all(self) -> list[LocalRank]:
        """The ranks, and the processes that wait to be one."""
        return [*self._ranks.values(), *self._tries.values()]

    # -- reports

    def _report(self, event: str, **facts: Any) -> None:
        self.reports.append({"event": event, **facts})

    def _tell(self, rank: LocalRank, event: str, **facts: Any) -> None:
        """Report what happened to a rank, with what its ring says that it did.

        What snapshots there are is known before: the controller may decide by it at once.
        """
        self.tell_snapshots()
        step, doing = None, ""
        if event != "told" or facts["what"] in ("failed", "restart"):
            view = self._rings.view(rank.rank)
            if view is not None and view.pid == rank.worker.pid:
                step, doing = view.step, what_it_did(view)
        self._report(event, rank=rank.rank, process=rank.process, step=step, doing=doing, **facts)

    def tell_snapshots(self) -> None:
        """Report which snapshots there are, if it is not what was reported last."""
        held = [
            (rank, sorted((mark.generation, mark.step) for mark in marks))
            for rank, marks in sorted(self._shelf.marks().items())
        ]
        facts = {"held": held, "reached": self._journal.steps, "epoch": self._shelf.epoch}
        if facts != self.told:
            self.told = facts
            self._report("snapshots", **facts)
