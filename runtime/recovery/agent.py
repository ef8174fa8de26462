"""The agent of a run: starts its ranks, sees which of them fail, and brings the run back.

It keeps the environment of torch's elastic launcher (RANK, WORLD_SIZE, MASTER_ADDR ..), and not its
agent: that one watches its processes as one group, so that the end of one is the end of all.

Ranks form a group again and again; each time is a *generation*, with a store of its own, so that no
rank reads what an earlier one has written, and a process that was given up finds nobody. After a
fault the ranks that are inside of `Trainer.fit` leave their group and keep their processes; others
are replaced. When all are there, the agent says which step all have in memory, and they go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from msc.ir.torch_private import TCPStore
from msc.runtime.diagnosis.blame import MISMATCH
from msc.runtime.recovery.arenas import HeldArena, newest_common
from msc.runtime.recovery.environment import HOST, rank_environment
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.faults import Fault, Memory, of_exit
from msc.runtime.recovery.health import STILL_S, Health
from msc.runtime.recovery.journal import Journal
from msc.runtime.recovery.members import Fit, Member, Stage
from msc.runtime.recovery.pool import TICK_S, Pool
from msc.runtime.recovery.process import Worker
from msc.runtime.recovery.repair import Repair

_LEAVE_S = 2.0
"""How long a rank may take to come out of its group, or the time of two of its steps."""
_LOST_S = 1.0
"""How long a lost connection waits for the fault that explains it."""


class Agent:
    """Runs a script as `nproc` ranks on this host.

    arguments: the script and its own; folder: of the run, for rings and events; standbys: how many
    processes wait, with `modules` imported, to take a rank; replacements, restarts: how many ranks
    may be replaced while others go on, and how often all may be started anew. With none of both a
    fault ends the run, and ranks do not know of the agent.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        nproc: int,
        folder: Path,
        *,
        standbys: int = 0,
        replacements: int = 0,
        restarts: int = 0,
        modules: Sequence[str] = (),
    ) -> None:
        self.events = Events(folder)
        self._arguments = list(arguments)
        self._folder = folder
        self._world = nproc
        self._replacements = replacements
        self._restarts = restarts
        self._budget = (replacements, restarts)
        self._recovers = replacements + restarts > 0
        self._journal = Journal.new()
        self._members: list[Member] = []
        self._arenas: dict[int, HeldArena] = {}
        self._health = Health()
        self._memory = Memory()
        self._generation = 0
        self._repair: Repair | None = None
        self._from_storage = False
        self._lost: float | None = None
        self._news: list[Fault] = []
        self._signal = 0
        self._code: int | None = None
        self._new_store()
        self._pool = Pool(self._environment(0), standbys, modules, self._standby_ended)

    def run(self) -> int:
        """Run to the end; the exit code: 0, that of the rank that failed, or 128 and a signal."""
        with self._signals():
            try:
                self._members = [Member(rank, self._pool.new()) for rank in range(self._world)]
                for member in self._members:
                    self._start(member)
                while self._code is None:
                    self._turn()
            finally:
                self._pool.end([member.worker for member in self._members])
        return self._code

    # -- processes

    def _new_store(self) -> None:
        patience = timedelta(minutes=5)
        self._store = TCPStore(HOST, 0, None, True, patience, False)

    def _environment(self, rank: int) -> dict[str, str]:
        most = self._budget[1]
        return rank_environment(rank, self._world, self._store.port, most - self._restarts, most)

    def _start(self, member: Member) -> None:
        journal = self._journal.handle if self._recovers else None
        environment = self._environment(member.rank)
        member.worker.start(self._arguments, environment, self._folder, journal)

    def _replace(self, member: Member, repair: Repair) -> None:
        """Give a rank to another process."""
        self._pool.part_with(member.worker)
        member.withdraw()
        worker, stood_by = self._pool.take()
        repair.standbys += stood_by
        repair.replaced.add(member.rank)
        self._members[member.rank] = member = Member(member.rank, worker)
        self._start(member)

    def _standby_ended(self, text: str) -> None:
        self.events.record("standby ended")
        self.events.say(text)

    # -- one turn

    def _turn(self) -> None:
        for worker, message, files in self._pool.heard():
            self._hear(worker, message, files)
        self._reap()
        if self._signal:
            self._code = 128 + self._signal
        elif self._code is None:
            self._look()
            if self._news:
                self._begin_repair()
            elif all(member.stage is Stage.ENDED for member in self._members):
                self._code = 0
            else:
                self._advance()

    def _reap(self) -> None:
        now = time.monotonic()
        for member in self._members:
            code = member.worker.poll()
            before, member.seen = member.seen, now
            if code is None or member.stage is Stage.ENDED or self._pool.is_doomed(member.worker):
                continue
            if code == 0 and member.fit is None:
                member.stage = Stage.ENDED
                self._pool.forget(member.worker)
                continue
            what, program = of_exit(code)
            status = code if code > 0 else 1
            self._note(member, what, code=status, program=program, detect_s=now - before)
        self._pool.reap()

    def _note(
        self, member: Member, what: str, step: int | None = None, more: str = "", **facts: Any
    ) -> None:
        """A fault of a rank, with what its ring says that it did, and `more`."""
        view = self._health.view(member.rank)
        doing = ""
        if view is not None and member.stage in (Stage.RUNS, Stage.LEAVES, Stage.WAITS):
            step = view.step if step is None else step
            wait = view.open_wait
            doing = f"while it waited on {wait.channel}" if wait else f"in phase '{view.phase}'"
        if member.told and "raised" not in what:
            doing = f"after {member.told}"
        doing = ", ".join(text for text in (more, doing) if text)
        self._news.append(Fault(member.rank, what, step or None, doing, **facts))

    def _look(self) -> None:
        """Find who is frozen, or alive without getting on."""
        if not self._recovers:
            return
        now = time.monotonic()
        for member in self._members:
            if member.stage is Stage.ENDED or not member.worker.stopped():
                member.stopped = None
            elif member.stopped is None:
                member.stopped = now
            elif now - member.stopped > STILL_S - 2 * TICK_S:
                member.stopped = None
                self._note(member, "is frozen (it was stopped)", detect_s=STILL_S)
        if self._news or any(m.stage is not Stage.RUNS or m.fit is None for m in self._members):
            return
        self._health.look()
        found = self._health.standstill()
        if found is None:
            return
        for cause in found.guilty:
            self._note(
                self._members[cause.rank],
                cause.what,
                more=cause.detail if cause.what == MISMATCH else f"for {found.seconds:.1f} s",
                program=True,
                detect_s=found.seconds,
            )
        if not found.guilty:
            self._news.append(Fault(None, found.text, None, detect_s=found.seconds))

    # -- what ranks tell

    def _hear(self, worker: Worker, message: dict[str, Any], files: list[int]) -> None:
        event = message.pop("event")
        if self._pool.is_standby(worker):
            worker.warm = event == "warm"
            self.events.record("standby is warm", pid=worker.pid)
            return
        member = next((each for each in self._members if each.worker is worker), None)
        if member is None or self._pool.is_doomed(worker):
            for handle in files:
                os.close(handle)
            return
        if event == "ready":
            member.trainer = message["trainer"]
            if member.trainer > 1:
                self._drop_arenas()  # they are of the Trainer before
            if member.stage in (Stage.RUNS, Stage.JOINS) and member.fit is not None:
                self._lost = self._lost or time.monotonic()  # it came out by itself
            member.stage = Stage.WAITS
        elif event == "ring":
            self._health.watch(member.rank, Path(message["ring"]), Path(message["schedule"]))
        elif event == "arena":
            member.offer(HeldArena(files[0], message["marks"]))
        elif event == "restored":
            self._restored(member, message)
        elif event == "fit":
            member.fit = Fit(**message)
        elif event == "fit over":
            member.fit = None
        elif event == "lost":
            self._lost = self._lost or time.monotonic()
        elif event == "restart":
            self._note(member, message["why"], restart=True)
        elif event == "failed" and not member.told:
            member.told = message["error"]
            if self._recovers:
                self._note(
                    member,
                    f"raised {member.told}",
                    message["step"],
                    program=True,
                    final=message.get("final", False),
                )
                self._pool.doom(worker)
        elif event == "caught up":
            if self._repair is not None:
                self._repair.caught_up = message["step"]
                self._finish_repair(self._repair)
        elif event == "mismatch":
            self.events.record("mismatch", generation=self._generation, **message)
            self.events.say(
                f"generation {self._generation}: step {message['step']} was repeated and its loss "
                f"is {message['found']!r}; the first time it was {message['recorded']!r}. The run "
                "is not what it was before the fault."
            )

    def _restored(self, member: Member, message: Mapping[str, Any]) -> None:
        member.stage = Stage.RUNS
        if member.arena is not None:
            old = self._arenas.get(member.rank)
            if old is not None:
                old.close()
            self._arenas[member.rank], member.arena = member.arena, None
        repair = self._repair
        if repair is not None:
            repair.load_s = max(repair.load_s, message["load_s"])
            repair.source = message["source"]
            repair.step = message["step"]
        if all(each.stage is Stage.RUNS for each in self._members):
            self._health.begin()
            if repair is not None:
                repair.restored = time.monotonic()
                self._finish_repair(repair)

    def _finish_repair(self, repair: Repair) -> None:
        """The run is where it was, if all ranks have said so."""
        if repair.caught_up is None or not repair.restored:
            return
        self._repair = None
        parts = repair.parts()
        whole = sum(parts.values())
        ranks = ", ".join(map(str, sorted(repair.replaced))) or "none"
        self.events.record(
            "recovered",
            generation=self._generation,
            restored=repair.step,
            step=repair.caught_up,
            source=repair.source,
            replaced=sorted(repair.replaced),
            standbys=repair.standbys,
            seconds=whole,
            parts=parts,
        )
        listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        self.events.say(
            f"generation {self._generation}: recovered in {whole:.2f} s ({listed}); state from "
            f"{repair.source}; ranks replaced: {ranks}, {repair.standbys} by a standby"
        )

    # -- repair

    def _begin_repair(self) -> None:
        faults, self._news = self._first_causes(self._news), []
        self._lost = None
        for fault in faults:
            self.events.record("fault", generation=self._generation, **vars(fault))
        dead = {fault.rank for fault in faults if fault.rank is not None}
        hopeless = self._memory.hopeless(faults) if self._recovers else ""
        if not self._recovers or hopeless:
            self._give_up(faults[0], hopeless)
            return
        common = newest_common(self._arenas, self._world)
        kept = [m for m in self._members if m.rank not in dead and m.can_go_on()]
        useful = self._generation > 0 and (kept or common is not None)
        if useful and len(dead) <= self._replacements and not any(f.restart for f in faults):
            self._replacements -= len(dead)
            then = "replaced" if dead else "all meet again"
        elif self._restarts:
            self._restarts -= 1
            kept = []
            self._from_storage = True
            then = "all ranks are started anew, with the state in storage"
        else:
            first, second = self._budget
            self._give_up(
                faults[0],
                f"all of its {first} replacements and {second} restarts are used",
            )
            return
        for fault in faults:
            self.events.say(f"generation {self._generation}: {fault}; {then}")
        if self._repair is None:
            self._repair = Repair(faults)
        self._take_apart(kept, self._repair)

    def _first_causes(self, faults: Sequence[Fault]) -> list[Fault]:
        """Where a rank has done something else than its program, a crash is no cause but follows.

        Of gloo, a collective that others do not have can end any of their processes.
        """
        if not self._recovers or not any(fault.program for fault in faults):
            return list(faults)
        causes = []
        for cause in self._health.mismatches():
            own = next((fault for fault in faults if fault.rank == cause.rank), None)
            if own is None or own.what != cause.what:
                self._note(self._members[cause.rank], cause.what, more=cause.detail, program=True)
                causes.append(self._news.pop())
        ranks = {cause.rank for cause in causes}
        return [*causes, *(fault for fault in faults if fault.rank not in ranks)]

    def _take_apart(self, kept: Sequence[Member], repair: Repair) -> None:
        patience = max(_LEAVE_S, 2 * self._health.slow_step_s())
        for member in kept:
            if member.stage in (Stage.RUNS, Stage.JOINS):
                member.worker.channel.send("leave", wait=False)
                member.stage = Stage.LEAVES
                member.deadline = time.monotonic() + patience
        self._new_store()  # closes the one before
        staying = {member.rank for member in kept}
        for member in list(self._members):
            if member.rank not in staying:
                self._replace(member, repair)
        if self._from_storage:
            self._drop_arenas()

    def _drop_arenas(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _advance(self) -> None:
        """Let a generation form when all are there; look after who does not come."""
        now = time.monotonic()
        repair = self._repair
        for member in list(self._members):
            if member.stage is Stage.LEAVES and now > member.deadline and repair is not None:
                self.events.say(
                    f"generation {self._generation}: rank {member.rank} does not come out of its "
                    "group; its process is killed, and the rank replaced"
                )
                self._replace(member, repair)
        if repair is not None and not repair.left:
            if not any(member.stage is Stage.LEAVES for member in self._members):
                repair.left = now
        waiting = all(member.stage is Stage.WAITS for member in self._members)
        if self._lost is not None and (waiting or now - self._lost > _LOST_S):
            gone = [member for member in self._members if member.stage is Stage.ENDED]
            for member in gone:
                self._note(member, "ended before the others did", code=1, program=True)
            if not gone:
                waited = now - self._lost
                self._news.append(Fault(None, "lost a connection", None, detect_s=waited))
            self._lost = None
            return
        if waiting:
            self._form()
        if repair is None and all(member.stage is Stage.RUNS for member in self._members):
            self._pool.stand_by()

    def _form(self) -> None:
        """All ranks are there: they form the next generation."""
        common = None if self._from_storage else newest_common(self._arenas, self._world)
        inside = [member.fit for member in self._members if member.fit is not None]
        self._generation += 1
        self._from_storage = False
        self._lost = None
        source = None
        files: list[int] = []
        if common is not None:
            source = {"step": common[0], "slots": common[1]}
            files = [self._arenas[rank].handle for rank in range(self._world)]
        for member in self._members:
            member.stage = Stage.JOINS
            member.worker.channel.send(
                "join",
                files,
                number=self._generation,
                host=HOST,
                port=self._store.port,
                source=source,
                last=inside[0].last if inside else None,
                reached=self._journal.steps,
            )
        if self._repair is not None:
            self._repair.joined = time.monotonic()
            self._repair.load_s = self._repair.restored = 0.0
            self._repair.caught_up = None

    # -- the end

    def _give_up(self, fault: Fault, why: str) -> None:
        while self._pool.waits_for_words:  # which the last word here explains
            self._pool.reap()
            time.sleep(TICK_S)
        self._code = fault.code
        self.events.record("gave up", generation=self._generation, why=why, **vars(fault))
        if self._recovers:
            text = f"generation {self._generation}: {fault}; the run ends, since {why}"
        elif fault.what.startswith("ended"):
            text = f"Rank {fault.rank} failed with exit code {fault.code}"
        else:
            text = f"Rank {fault.rank} {fault.what}"
        self.events.say(f"{text}; the other ranks were stopped.")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Being asked to stop ends the run; only a main thread can hear it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _: object) -> None:
            self._signal = number

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
