"""The controller of a run: what its ranks are to do, and what is done when some are lost.

It has no process and no file of theirs. Agents, one a node (`node.py`), tell it what they see
(`Controller.hear`), and are told what to do.

Ranks form a group again and again; each time is a *generation*, with a store of its own, so that no
rank reads what an earlier one has written, and a process that was given up finds nobody. After a
fault the ranks that are inside of `Trainer.fit` leave their group and keep their processes; others
are replaced. When all are there, the controller says which step all have in memory, and they go on.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from msc.ir.torch_private import TCPStore
from msc.runtime.checkpoint.marks import Mark
from msc.runtime.recovery.arenas import newest_common
from msc.runtime.recovery.environment import Layout
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.faults import Fault, Memory, of_exit
from msc.runtime.recovery.growth import Growth, new_store
from msc.runtime.recovery.health import Health
from msc.runtime.recovery.members import Fit, Member, Stage
from msc.runtime.recovery.places import Place, Places
from msc.runtime.recovery.repair import Repair
from msc.runtime.recovery.rings import what_it_did
from msc.runtime.recovery.sizes import Size, Sizes

_LEAVE_S = 2.0
"""How long a rank may take to come out of its group, or the time of two of its steps."""
_LOST_S = 1.0
"""How long a lost connection waits for the fault that explains it."""
_ASK_AGAIN_S = 30.0
"""After a step could not be saved, the ranks are asked again to give way to more."""


class Send(Protocol):
    """Gives an agent a command; what it is to do comes as JSON."""

    def __call__(self, command: str, /, **facts: Any) -> None: ...


@dataclass
class Node:
    """A node as the controller knows it.

    held: the snapshots that its agent has, by rank, and the slots they are in; rings: what was read
    last, None while that is not there.
    """

    send: Send
    held: dict[int, dict[Mark, int]] = field(default_factory=dict)
    rings: Sequence[Mapping[str, Any]] | None = None


@dataclass
class Budget:
    """What may still be done after faults.

    How many ranks may be replaced, how often all may be started anew, and on how few ranks the run
    may go on (None: on no fewer than it was started for).
    """

    replacements: int
    restarts: int
    least: int | None = None

    @property
    def recovers(self) -> bool:
        """Whether a fault is not the end."""
        return self.replacements + self.restarts > 0 or self.least is not None


class Controller:
    """Decides for the ranks of `layout`.

    nodes: in the order of the layout; host: of this process, as ranks find it; budget: how much may
    be done after faults. With none a fault ends the run, and ranks do not know of their agents.
    code: the exit code of the run, once it is over: 0, or that of the rank that failed.
    """

    def __init__(
        self, layout: Layout, nodes: Sequence[Node], host: str, budget: Budget, events: Events
    ) -> None:
        self.code: int | None = None
        self._layout = layout
        self._world = layout.world
        self._nodes = list(nodes)
        self._host = host
        self._budget = budget
        self._first_budget = replace(budget)
        self._least = layout.world if budget.least is None else budget.least
        self._recovers = budget.recovers
        self._sizes = Sizes()
        self._places = Places(layout.full)
        self._events = events
        self._members: list[Member] = []
        self._processes = itertools.count()
        self._growth = Growth(self._places, host, self._processes, events, self._give)
        self._asked: float | None = None
        self._health = Health()
        self._memory = Memory()
        self._generation = 0
        self._reached = 0
        self._repair: Repair | None = None
        self._from_storage = False
        self._calm = False
        self._lost: float | None = None
        self._news: list[Fault] = []
        self._speaking: set[int] = set()  # processes that have yet to say what failed
        self._end: tuple[Fault, str] | None = None
        self._repeated = 0
        self._new_store()

    def begin(self) -> None:
        """Start all ranks."""
        self._members = [Member(rank, next(self._processes)) for rank in range(self._world)]
        for member in self._members:
            self._start(member)

    def turn(self) -> None:
        """Act on what was heard; to be called again and again, some times in a second."""
        if self._end is not None:
            if not self._speaking:  # which the last word here explains
                self._give_up(*self._end)
            return
        self._look()
        if self._news:
            self._begin_repair()
        elif all(member.stage is Stage.ENDED for member in self._members):
            self.code = 0
        else:
            self._advance()

    # -- processes

    def _new_store(self) -> None:
        self._store = new_store(self._host)

    def _node(self, rank: int) -> Node:
        return self._nodes[self._layout.node_of(rank)]

    def _start(self, member: Member) -> None:
        self._node(member.rank).send(
            "start",
            rank=member.rank,
            process=member.process,
            environment=self._environment(self._layout, member.rank, self._store),
        )

    def _environment(self, layout: Layout, rank: int, store: TCPStore) -> dict[str, str]:
        restarts = self._first_budget.restarts - self._budget.restarts
        return layout.environment(rank, self._host, store.port, restarts)

    def _give(self, member: Member, command: str, store: TCPStore, /) -> None:
        """For `Growth`."""
        whole = self._layout.on(None)
        node = self._nodes[whole.node_of(member.rank)]
        if command == "drop":
            node.send("drop", process=member.process)
            return
        node.send(
            "try",
            rank=member.rank,
            process=member.process,
            environment=self._environment(whole, member.rank, store),
        )

    def _replace(self, member: Member, repair: Repair) -> None:
        """Give a rank to another process."""
        repair.replaced.add(member.rank)
        self._members[member.rank] = member = Member(member.rank, next(self._processes))
        self._start(member)

    # -- what agents tell

    def hear(self, node: Node, report: dict[str, Any]) -> None:
        """Take note of a report of a node's agent."""
        event = report.pop("event")
        if event == "snapshots":
            self._reached = max(self._reached, report["reached"])
            node.held = {
                rank: {Mark(generation, step): slot for slot, generation, step in found}
                for rank, found in report["held"]
            }
        elif event == "steps":
            if self._all_train():
                self._health.hear(dict(report["steps"]))
        elif event == "rings":
            node.rings = report["rings"]
        elif event == "standby":
            self._events.record("standby is warm", pid=report["pid"])
        elif event == "standby lost":
            self._events.say("a standby process ended before it was needed; there is no new one")
        elif event == "silent":
            self._speaking.discard(report["process"])
        else:
            rank, process = report.pop("rank"), report.pop("process")
            what = report["what"] if event == "told" else event
            if self._growth.hear(process, what, report.get("facts", {}), time.monotonic()):
                return
            member = self._members[rank] if rank < self._world else None
            if member is not None and member.process == process:
                self._hear_of(member, event, report)

    def _hear_of(self, member: Member, event: str, report: dict[str, Any]) -> None:
        if event == "started":
            if self._repair is not None:
                self._repair.standbys += report["stood_by"]
            return
        step, doing = report["step"], report["doing"]
        if event == "exit":
            self._exited(member, report["code"], step, doing, report["detect_s"])
        elif event == "frozen":
            what = "is frozen (it was stopped)"
            self._note(member, what, step, doing, detect_s=report["detect_s"])
        elif event == "told":
            self._told(member, report["what"], report["facts"], step, doing)

    def _exited(
        self, member: Member, code: int, step: int | None, doing: str, detect_s: float
    ) -> None:
        if code == 0 and member.fit is None:
            member.stage = Stage.ENDED
            return
        what, program = of_exit(code)
        status = code if code > 0 else 1
        self._note(member, what, step, doing, code=status, program=program, detect_s=detect_s)

    def _note(self, member: Member, what: str, step: int | None, doing: str, **facts: Any) -> None:
        """A fault of a rank."""
        if member.told and "raised" not in what:
            doing = f"after {member.told}"
        self._news.append(Fault(member.rank, what, step or None, doing, **facts))

    def _told(
        self, member: Member, event: str, facts: dict[str, Any], step: int | None, doing: str
    ) -> None:
        """What a rank tells."""
        if event == "ready":
            member.trainer = facts["trainer"]
            if member.trainer > 1:
                self._forget_snapshots()  # they are of the Trainer before
            if member.stage is Stage.RUNS and member.fit is not None:
                self._lost = self._lost or time.monotonic()  # it came out by itself
            member.stage = Stage.WAITS
            self._places.met(self._layout.places[member.rank])
        elif event == "program":
            self._sizes.hear(**facts)
        elif event == "gave way":
            self._grow(facts["step"])
        elif event == "goes on":
            self._asked = time.monotonic() + _ASK_AGAIN_S
            self._events.say(
                f"generation {self._generation}: step {facts['step']} was not saved, so that the "
                "run does not grow back now"
            )
        elif event == "restored":
            self._restored(member, facts)
        elif event == "fit":
            member.fit = Fit(**facts)
        elif event == "fit over":
            member.fit = None
        elif event == "lost":
            self._lost = self._lost or time.monotonic()
        elif event == "restart":
            self._note(member, facts["why"], step, doing, restart=True)
        elif event == "failed" and not member.told:
            member.told = facts["error"]
            if self._recovers:
                what = f"raised {member.told}"
                at = step if facts["step"] is None else facts["step"]
                self._note(member, what, at, doing, program=True, final=facts.get("final", False))
                self._speaking.add(member.process)
        elif event == "caught up":
            if self._repair is not None:
                self._repair.caught_up = facts["step"]
                self._finish_repair(self._repair)
        elif event == "mismatch" and facts["step"] > self._repeated:
            self._repeated = facts["step"]  # each node tells it
            self._events.record("mismatch", generation=self._generation, **facts)
            self._events.say(
                f"generation {self._generation}: step {facts['step']} was repeated and its loss "
                f"is {facts['found']!r}; the first time it was {facts['recorded']!r}. The run "
                "is not what it was before the fault."
            )

    def _restored(self, member: Member, facts: Mapping[str, Any]) -> None:
        member.stage = Stage.RUNS
        repair = self._repair
        if repair is not None:
            repair.load_s = max(repair.load_s, facts["load_s"])
            repair.source = facts["source"]
            repair.step = facts["step"]
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
        self._events.record(
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
        self._events.say(
            f"generation {self._generation}: recovered in {whole:.2f} s ({listed}); state from "
            f"{repair.source}; ranks replaced: {ranks}, {repair.standbys} by a standby"
        )

    # -- ranks that do not get on

    def _all_train(self) -> bool:
        """Whether all ranks are inside of `fit`, with nothing wrong so far."""
        fine = self._recovers and not self._news
        return fine and all(m.stage is Stage.RUNS and m.fit is not None for m in self._members)

    def _look(self) -> None:
        """Find who is alive without getting on."""
        if not self._all_train():
            return
        if self._health.wants_rings():
            for node in self._nodes:
                node.rings = None
                node.send("read rings")
        found = [node.rings for node in self._nodes if node.rings is not None]
        if len(found) == len(self._nodes):
            self._judge(list(itertools.chain(*found)))

    def _judge(self, rings: Sequence[Mapping[str, Any]]) -> None:
        for node in self._nodes:
            node.rings = None
        found = self._health.judge(rings, self._world)
        if found is None:
            return
        for cause in found.guilty:
            view = found.views.get(cause.rank)
            self._note(
                self._members[cause.rank],
                f"{cause.what} for {found.seconds:.1f} s",
                None if view is None else view.step,
                "" if view is None else what_it_did(view),
                program=True,
                detect_s=found.seconds,
            )
        if not found.guilty:
            self._news.append(Fault(None, found.text, None, detect_s=found.seconds))

    # -- repair

    def _common(self) -> Mark | None:
        """The newest snapshot that there is of every rank."""
        held: dict[int, set[Mark]] = {}
        for node in self._nodes:
            for rank, marks in node.held.items():
                held.setdefault(rank, set()).update(marks)
        return newest_common(held, self._world)

    def _begin_repair(self) -> None:
        faults, self._news = self._news, []
        self._lost = None
        self._calm = False
        for fault in faults:
            self._events.record("fault", generation=self._generation, **vars(fault))
        dead = {fault.rank for fault in faults if fault.rank is not None}
        failing = self._failing(faults)
        hopeless = self._memory.hopeless(faults) if self._recovers else ""
        if failing and not any(fault.final for fault in faults):
            if self._go_on_without(failing, faults):
                return
        if not self._recovers or hopeless:
            self._end = faults[0], hopeless
            return
        kept = [m for m in self._members if m.rank not in dead and m.can_go_on()]
        useful = self._generation > 0 and (kept or self._common() is not None)
        enough = len(dead) <= self._budget.replacements
        if useful and enough and not any(fault.restart for fault in faults):
            self._budget.replacements -= len(dead)
            then = "replaced" if dead else "all meet again"
        elif self._budget.restarts:
            self._budget.restarts -= 1
            kept = []
            self._from_storage = True
            then = "all ranks are started anew, with the state in storage"
        else:
            first = self._first_budget
            why = f"all of its {first.replacements} replacements and {first.restarts} restarts"
            lost = {self._layout.places[rank] for rank in dead}
            if not self._go_on_without(lost, faults):
                self._end = faults[0], f"{why} are used{self._why_not_fewer(len(lost))}"
            return
        for fault in faults:
            self._events.say(f"generation {self._generation}: {fault}; {then}")
        if self._repair is None:
            self._repair = Repair(faults)
        self._take_apart(kept, self._repair)

    # -- fewer ranks, and more again

    def _failing(self, faults: Sequence[Fault]) -> set[Place]:
        """The places whose processes end again and again before they meet the others."""
        found = set()
        for fault in faults:
            if fault.rank is not None and self._members[fault.rank].stage is Stage.STARTS:
                place = self._layout.places[fault.rank]
                if self._places.ended_early(place):
                    found.add(place)
        return found

    def _go_on_without(self, lost: set[Place], faults: Sequence[Fault]) -> bool:
        """Start all ranks anew on other places, fewer if there are no others; whether it can be."""
        usable = [place for place in self._places.usable if place not in lost]
        size = self._sizes.largest(len(usable), self._least)
        whole = len(self._places.full)
        if not lost or size is None or self._least >= whole:
            return False
        for place in sorted(lost):
            self._places.lose(place, time.monotonic())
        for fault in faults:
            self._events.say(f"generation {self._generation}: {fault}; it cannot be replaced")
        self._tell_size(size, sorted(lost))
        if self._repair is None:
            self._repair = Repair(list(faults))
        self._new_store()  # closes the one before
        self._move(self._layout.on(self._places.choose(size.ranks)), {}, self._repair)
        return True

    def _why_not_fewer(self, lost: int) -> str:
        if not lost or self._least >= len(self._places.full):
            return ""
        why = self._sizes.why_not(len(self._places.usable) - lost, self._least)
        return f", and it cannot go on with fewer ranks: {why}"

    def _tell_size(self, size: Size, lost: Sequence[Place]) -> None:
        whole, before = len(self._places.full), self._sizes.of(self._world) or size
        self._events.record(
            "ranks",
            generation=self._generation,
            ranks=size.ranks,
            of=whole,
            dp=[before.dp, size.dp],
            micro_batches=[before.micro_batches, size.micro_batches],
            lost=lost,
        )
        without = f" without {', '.join(map(str, lost))}" if lost else ""
        self._events.say(
            f"generation {self._generation}: the run goes on with {size.ranks} of {whole} ranks"
            f"{without}: dp {before.dp} -> {size.dp}, micro-batches {before.micro_batches} -> "
            f"{size.micro_batches}; all ranks are started anew, with the state in storage"
        )

    def _move(self, layout: Layout, arrived: Mapping[int, Member], repair: Repair) -> None:
        """Start all ranks anew where `layout` says, but for those whose processes are there."""
        for member in self._members:
            self._node(member.rank).send("stop", rank=member.rank)
        self._layout, self._world = layout, layout.world
        self._health, self._memory = Health(), Memory()
        self._from_storage = True
        self._forget_snapshots()
        self._members = []
        for rank in range(self._world):
            if rank in arrived:
                self._members.append(arrived[rank])
                self._node(rank).send("adopt", process=arrived[rank].process)
            else:
                self._members.append(Member(rank, next(self._processes)))
                self._start(self._members[rank])
        repair.replaced = set(range(self._world))

    def _try_to_grow(self, now: float) -> None:
        """All ranks train: try lost places, and ask the ranks to stop when all are back."""
        if self._world == len(self._places.full) or not self._sizes.saved:
            return
        self._growth.turn(now)
        if self._growth.is_complete and (self._asked is None or now >= self._asked):
            self._asked = math.inf
            self._node(0).send("grow", rank=0)

    def _grow(self, step: int) -> None:
        """The state of `step` is saved, and all ranks wait to be ended."""
        size = self._sizes.of(len(self._places.full))
        assert size is not None, "the run was started for it"
        self._tell_size(size, [])
        self._news.clear()
        self._lost = None
        self._repair = Repair([])
        self._store, arrived = self._growth.take()
        self._move(self._layout.on(None), arrived, self._repair)

    # -- taking a generation apart

    def _take_apart(self, kept: Sequence[Member], repair: Repair) -> None:
        patience = max(_LEAVE_S, 2 * self._health.slow_step_s())
        for member in kept:
            if member.stage in (Stage.RUNS, Stage.JOINS):
                self._node(member.rank).send("leave", rank=member.rank)
                member.stage = Stage.LEAVES
                member.deadline = time.monotonic() + patience
        self._new_store()  # closes the one before
        staying = {member.rank for member in kept}
        for member in list(self._members):
            if member.rank not in staying:
                self._replace(member, repair)
        if self._from_storage:
            self._forget_snapshots()

    def _forget_snapshots(self) -> None:
        for node in self._nodes:
            node.held.clear()
            node.send("forget snapshots")

    def _advance(self) -> None:
        """Let a generation form when all are there; look after who does not come."""
        now = time.monotonic()
        repair = self._repair
        for member in list(self._members):
            if member.stage is Stage.LEAVES and now > member.deadline and repair is not None:
                self._events.say(
                    f"generation {self._generation}: rank {member.rank} does not come out of its "
                    "group; its process is killed, and the rank replaced"
                )
                self._replace(member, repair)
        if repair is not None and not repair.left:
            if not any(member.stage is Stage.LEAVES for member in self._members):
                repair.left = now
        if self._lost is not None and now - self._lost > _LOST_S:
            gone = [member for member in self._members if member.stage is Stage.ENDED]
            for member in gone:
                self._note(member, "ended before the others did", None, "", code=1, program=True)
            if not gone:
                self._news.append(Fault(None, "lost a connection", None, detect_s=_LOST_S))
            self._lost = None
            return
        if all(member.stage is Stage.WAITS for member in self._members):
            self._form()
        if repair is None and all(member.stage is Stage.RUNS for member in self._members):
            self._try_to_grow(now)
            if not self._calm:
                self._calm = True
                for node in self._nodes:
                    node.send("stand by")

    def _form(self) -> None:
        """All ranks are there: they form the next generation."""
        common = None if self._from_storage else self._common()
        inside = [member.fit for member in self._members if member.fit is not None]
        self._generation += 1
        self._from_storage = False
        self._calm = False
        self._lost = None
        self._asked = None
        for member in self._members:
            member.stage = Stage.JOINS
        for node in self._nodes:
            slots = [] if common is None else [node.held[r][common] for r in sorted(node.held)]
            node.send(
                "join",
                number=self._generation,
                host=self._host,
                port=self._store.port,
                step=None if common is None else common.step,
                slots=slots,
                last=inside[0].last if inside else None,
                reached=self._reached,
                may_grow=self._world < len(self._places.full),
            )
        if self._repair is not None:
            self._repair.joined = time.monotonic()
            self._repair.load_s = self._repair.restored = 0.0
            self._repair.caught_up = None

    # -- the end

    def _give_up(self, fault: Fault, why: str) -> None:
        self.code = fault.code
        self._events.record("gave up", generation=self._generation, why=why, **vars(fault))
        if self._recovers:
            text = f"generation {self._generation}: {fault}; the run ends, since {why}"
        elif fault.what.startswith("ended"):
            text = f"Rank {fault.rank} failed with exit code {fault.code}"
        else:
            text = f"Rank {fault.rank} {fault.what}"
        self._events.say(f"{text}; the other ranks were stopped.")
