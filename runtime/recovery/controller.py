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
from dataclasses import dataclass, replace
from typing import Any

from msc.ir.torch_private import TCPStore
from msc.runtime.checkpoint.marks import Mark
from msc.runtime.diagnosis.blame import MISMATCH
from msc.runtime.diagnosis.ring import RankView
from msc.runtime.recovery.environment import Layout
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.faults import Fault, Memory, of_exit
from msc.runtime.recovery.growth import Growth, new_store
from msc.runtime.recovery.health import Health
from msc.runtime.recovery.inquiry import Inquiry
from msc.runtime.recovery.members import Fit, Member, Stage
from msc.runtime.recovery.places import Place
from msc.runtime.recovery.repair import Repair
from msc.runtime.recovery.resizing import Resizing
from msc.runtime.recovery.rings import what_it_did
from msc.runtime.recovery.roster import Node, Roster

_LEAVE_S = 2.0
"""How long a rank may take to come out of its group, or the time of two of its steps."""
_LOST_S = 1.0
"""How long a lost connection waits for the fault that explains it."""
_ASK_AGAIN_S = 30.0
"""After a step could not be saved, the ranks are asked again to give way."""
_RETURN_S = 10.0
"""How long a controller that was started anew waits for the nodes of the one before."""
_COUNT_S = 1.0
"""Between two looks at which snapshots have copies."""


@dataclass
class Budget:
    """What may still be done after faults.

    How many ranks may be replaced (all of a lost node count as one), how often all may be started
    anew, and on how few ranks the run may go on (None: on no fewer than it was started for).
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

    host: of this process, as ranks find it; budget: how much may be done after faults. With none a
    fault ends the run, and ranks do not know of their agents. spares: how many nodes may wait to
    take the place of a lost one; patience_s: how long nodes are waited for, at the beginning and
    when one was lost; copies: whether nodes keep copies of each other's snapshots.
    code: the exit code of the run, once it is over: 0, or that of the rank that failed.
    """

    def __init__(
        self,
        layout: Layout,
        host: str,
        budget: Budget,
        events: Events,
        *,
        spares: int = 0,
        patience_s: float = 600.0,
        copies: bool = True,
    ) -> None:
        self.code: int | None = None
        self._layout = layout
        self._world = layout.world
        self._roster = Roster(layout, spares)
        self._host = host
        self._budget = budget
        self._first_budget = replace(budget)
        self._recovers = budget.recovers
        self._resizing = Resizing(layout.full, budget.least, events)
        places = self._resizing.places
        self._growth = Growth(places, host, self._new_process, events, self._give)
        self._asked: float | None = None
        self._patience_s = patience_s
        self._copies = copies
        self._events = events
        self._members: list[Member] = []
        self._processes = 0
        self._health = Health()
        self._memory = Memory()
        self._generation = 0
        self._epoch = 0
        self._memos = 0
        self._repair: Repair | None = None
        self._from_storage = False
        self._calm = False
        self._lost: float | None = None
        self._since = time.monotonic()  # nodes are waited for
        self._inquiry: Inquiry | None = None
        self._returned: list[tuple[Node, Mapping[str, Any]]] = []
        self._early: list[tuple[Node, dict[str, Any]]] = []  # told before the run began
        self._news: list[Fault] = []
        self._speaking: dict[int, Node] = {}  # processes that have yet to say what failed
        self._end: tuple[Fault, str] | None = None
        self._repeated = 0
        self._next_count = 0.0
        self._copied: Mark | None = None
        self._new_store()

    # -- nodes

    def joins(self, node: Node, state: Mapping[str, Any]) -> tuple[str, bool]:
        """A node's agent has come: why it cannot be one of the run, and whether it keeps its ranks.

        state: see `NodeAgent.state`. It keeps them if it had them of a controller before this one;
        those of a node that was given up have other processes.
        """
        if state["memo"] is not None and not self._members:
            self._returned.append((node, state))
            self._since = time.monotonic()
            return "", True
        refusal = self._roster.refusal(node)
        if not refusal:
            self._roster.waiting.append(node)
            node.send("forget snapshots", epoch=self._epoch)
            if self._members:
                self._calm = False
                self._events.record("node joined", node=node.name)
        return refusal, False

    def loses(self, node: Node, why: str, detect_s: float) -> None:
        """A node's agent is gone, and its ranks with it."""
        self._returned = [each for each in self._returned if each[0] is not node]
        self._speaking = {p: n for p, n in self._speaking.items() if n is not node}
        name = str(node)
        self._roster.remove(node)
        if node.index is not None:
            self._growth.lose(node.index, time.monotonic())
        if node.index is None or not self._ranks_of(node.index):
            self._events.say(f"{name} is gone ({why})")
            return
        self._lose(self._ranks_of(node.index), name, why, detect_s)

    def _lose(self, ranks: Sequence[int], name: str, why: str, detect_s: float) -> None:
        lost = [rank for rank in ranks if self._members[rank].stage is not Stage.ENDED]
        if lost:
            what, step = f"is gone ({why})", self._health.step_of(lost)
            self._news.append(
                Fault(None, what, step or None, detect_s=detect_s, node=name, lost=tuple(lost))
            )

    def _ranks_of(self, index: int) -> list[int]:
        return [rank for rank in range(self._world) if self._layout.node_of(rank) == index]

    def _gather(self) -> None:
        """Start all ranks when all nodes are there."""
        late = time.monotonic() - self._since
        if self._returned:
            if len(self._returned) == self._layout.nnodes or late > _RETURN_S:
                self._relearn()
        elif self._roster.is_complete():
            self._roster.seat()
            self._members = [Member(rank, self._new_process()) for rank in range(self._world)]
            for member in self._members:
                self._start(member)
            self._remember()
            for node in self._roster.waiting:
                node.send("stand by", least=self._layout.nproc)
        elif late > self._patience_s:
            self.code = 1
            found = len(self._roster.waiting)
            self._events.say(
                f"{found} of {self._layout.nnodes} nodes have come within {late:.0f} s; "
                "the run ends. Start msc run on each node, with the same --rdzv and --rdzv-id."
            )

    def _remember(self) -> None:
        """Have agents keep what a controller must know that takes this one's place."""
        self._memos += 1
        memo = {
            "number": self._memos,
            "generation": self._generation,
            "epoch": self._epoch,
            "processes": self._processes,
            "replacements": self._budget.replacements,
            "restarts": self._budget.restarts,
            "places": self._layout.chosen,
            "resizing": self._resizing.to_data(),
        }
        for node in self._roster.seated.values():
            node.send("remember", memo=memo)

    def _relearn(self) -> None:
        """Go on where another controller was, by what the agents of its nodes say."""
        returned, self._returned = self._returned, []
        memo = max((state["memo"] for _, state in returned), key=lambda each: each["number"])
        self._memos, self._generation = memo["number"], memo["generation"]
        self._epoch, self._processes = memo["epoch"], memo["processes"]
        self._budget = replace(
            self._budget, replacements=memo["replacements"], restarts=memo["restarts"]
        )
        if memo["places"] is not None:
            self._lay_out(self._layout.on([Place(*place) for place in memo["places"]]))
        self._resizing.learn(memo["resizing"])
        self._members = [
            Member(rank, self._new_process(), Stage.HOMELESS) for rank in range(self._world)
        ]
        for node, state in returned:
            node.send("drop", process=None)  # the store that those know is gone
            if not state["ranks"]:
                self._roster.waiting.append(node)
                continue
            self._roster.place(node, self._layout.node_of(state["ranks"][0]["rank"]))
            for found in state["ranks"]:
                self._relearn_rank(found)
        missing = [i for i in range(self._layout.nnodes) if i not in self._roster.seated]
        for index in missing:
            why = "it has not come back to a controller that was started anew"
            self._lose(self._ranks_of(index), f"node {index}", why, _RETURN_S)
        if any(m.stage not in (Stage.RUNS, Stage.ENDED, Stage.HOMELESS) for m in self._members):
            what = "was between two generations when its controller was lost"
            self._news.append(Fault(None, what, None))
        self._events.record("state re-learned", generation=self._generation, nodes=len(returned))
        self._events.say(
            f"generation {self._generation}: the controller was started anew; state re-learned "
            f"from {len(returned)} of {self._layout.nnodes} nodes"
        )

    def _relearn_rank(self, found: Mapping[str, Any]) -> None:
        fit = None if found["fit"] is None else Fit(**found["fit"])
        stage, rank = Stage(found["stage"]), found["rank"]
        member = Member(rank, found["process"], stage, found["trainer"], fit)
        self._members[rank] = member
        if found["told"] and self._recovers:
            member.told = found["told"]
            self._note(member, f"raised {member.told}", None, "", program=True)
        elif found["code"] is not None:
            self._exited(member, found["code"], None, "", 0.0)

    def turn(self) -> None:
        """Act on what was heard; to be called again and again, some times in a second."""
        if self._end is not None:
            if not self._speaking:  # which the last word here explains
                self._give_up(*self._end)
            return
        if not self._members:
            self._gather()
            while self._members and self._early:
                self.hear(*self._early.pop(0))
            return
        self._look()
        if self._news:
            if self._knows_the_cause():
                self._begin_repair()
        elif all(member.stage is Stage.ENDED for member in self._members):
            self.code = 0
        else:
            self._advance()

    # -- processes

    def _new_store(self) -> None:
        self._store = new_store(self._host)

    def _new_process(self) -> int:
        self._processes += 1
        return self._processes

    def _send(self, member: Member, command: str, **facts: Any) -> None:
        node = self._roster.of(member.rank)
        if node is not None:  # else it was lost just now, which is told next
            node.send(command, rank=member.rank, **facts)

    def _start(self, member: Member) -> None:
        environment = self._environment(self._layout, member.rank, self._store)
        self._send(member, "start", process=member.process, environment=environment)
        member.stage = Stage.STARTS

    def _environment(self, layout: Layout, rank: int, store: TCPStore) -> dict[str, str]:
        restarts = self._first_budget.restarts - self._budget.restarts
        return layout.environment(rank, self._host, store.port, restarts)

    def _replace(self, member: Member, repair: Repair) -> None:
        """Give a rank to another process, as soon as there is a node for it."""
        repair.replaced.add(member.rank)
        member = Member(member.rank, self._new_process(), Stage.HOMELESS)
        self._members[member.rank] = member
        if self._roster.of(member.rank) is not None:
            self._start(member)

    # -- what agents tell

    def hear(self, node: Node, report: dict[str, Any]) -> None:
        """Take note of a report of a node's agent."""
        if not self._members:
            self._early.append((node, report))
            return
        event = report.pop("event")
        if event == "snapshots":
            if report["epoch"] == self._epoch:
                node.reached = report["reached"]
                node.held = {
                    rank: {Mark(generation, step) for generation, step in found}
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
            self._calm = False
            self._events.record("standby ended")
            then = "another is started" if report["warm"] else "there is no new one"
            self._events.say(f"a standby process ended before it was needed; {then}")
        elif event == "silent":
            self._speaking.pop(report["process"], None)
        else:
            rank, process = report.pop("rank"), report.pop("process")
            what = report["what"] if event == "told" else event
            if self._growth.hear(process, what, report.get("facts", {}), time.monotonic()):
                return
            member = self._members[rank] if rank < self._world else None
            if member is not None and member.process == process:
                self._hear_of(node, member, event, report)

    def _hear_of(self, node: Node, member: Member, event: str, report: dict[str, Any]) -> None:
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
            if report["what"] == "failed" and not member.told and self._recovers:
                self._speaking[member.process] = node
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
            if member.stage in (Stage.RUNS, Stage.JOINS) and member.fit is not None:
                self._lost = self._lost or time.monotonic()  # it came out by itself
            member.stage = Stage.WAITS
            self._resizing.places.met(self._layout.places[member.rank])
        elif event == "program":
            self._resizing.sizes.hear(**facts)
        elif event == "gave way":
            self._grow()
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
            self._health.begin(facts["step"])
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
        nodes = list(self._roster.seated.values())
        if self._health.wants_rings():
            for node in nodes:
                node.rings = None
                node.send("read rings")
        found = [node.rings for node in nodes if node.rings is not None]
        if len(found) == len(nodes):
            for node in nodes:
                node.rings = None
            self._judge(list(itertools.chain(*found)))

    def _judge(self, rings: Sequence[Mapping[str, Any]]) -> None:
        found = self._health.judge(rings, self._world)
        if found is None:
            return
        for cause in found.guilty:
            more = cause.detail if cause.what == MISMATCH else f"for {found.seconds:.1f} s"
            self._note(
                self._members[cause.rank],
                cause.what,
                *_in_its_ring(found.views.get(cause.rank), more),
                program=True,
                detect_s=found.seconds,
            )
        if not found.guilty:
            self._news.append(Fault(None, found.text, None, detect_s=found.seconds))

    # -- repair

    def _knows_the_cause(self) -> bool:
        """Whether the first cause of the news is known: rings may have to be read for it.

        Where a rank has done something else than its program, a crash is no cause but follows: of
        gloo, a collective that others do not have can end any of their processes. Rings are read
        twice, as a rank that goes on may write what is being read.
        """
        if not self._recovers or not any(fault.program for fault in self._news):
            return True
        nodes = list(self._roster.seated.values())
        if self._inquiry is None:
            self._inquiry = Inquiry(nodes, time.monotonic())
        answer = self._inquiry.answer(self._health, self._world)
        if answer is None:
            return False
        self._inquiry = None
        causes = []
        for cause, view in answer:
            own = next((fault for fault in self._news if fault.rank == cause.rank), None)
            if own is None or own.what != cause.what:
                where = _in_its_ring(view, cause.detail)
                self._note(self._members[cause.rank], cause.what, *where, program=True)
                causes.append(self._news.pop())
        ranks = {cause.rank for cause in causes}
        self._news = [*causes, *(fault for fault in self._news if fault.rank not in ranks)]
        return True

    def _begin_repair(self) -> None:
        faults, self._news = self._news, []
        self._lost = None
        self._calm = False
        for fault in faults:
            self._events.record("fault", generation=self._generation, **vars(fault))
        dead = {fault.rank for fault in faults if fault.rank is not None}
        cost = len(dead) + len([fault for fault in faults if fault.lost])
        if not cost and self._repair is not None:
            cost = 1  # else what fails in a recovery each time would be tried for ever
        dead.update(*(fault.lost for fault in faults))
        gone = self._gone(faults)
        hopeless = self._memory.hopeless(faults) if self._recovers else ""
        if not any(fault.final for fault in faults) and self._go_on_without(gone, faults):
            return
        if not self._recovers or hopeless:
            self._end = faults[0], hopeless
            return
        kept = [m for m in self._members if m.rank not in dead and m.can_go_on()]
        useful = self._generation > 0 and (kept or self._roster.newest_common() is not None)
        enough = cost <= self._budget.replacements
        if useful and enough and not any(fault.restart for fault in faults):
            self._budget.replacements -= cost
            then = "replaced" if dead else "all meet again"
        elif self._budget.restarts:
            self._budget.restarts -= 1
            kept = []
            self._from_storage = True
            then = "all ranks are started anew, with the state in storage"
        else:
            gone = {self._layout.places[rank] for rank in dead}
            if not self._go_on_without(gone, faults):
                first = self._first_budget
                why = f"all of its {first.replacements} replacements and {first.restarts} restarts"
                self._end = faults[0], f"{why} are used{self._resizing.why_not(len(gone))}"
            return
        for fault in faults:
            self._events.say(f"generation {self._generation}: {fault}; {then}")
        self._seat()
        for index in range(self._layout.nnodes):
            if index not in self._roster.seated:
                self._events.say(
                    f"generation {self._generation}: no node waits that could be node {index}; one "
                    f"is waited for, {self._patience_s:.0f} s at most"
                )
        if self._repair is None:
            self._repair = Repair(faults)
        self._take_apart(kept, self._repair)

    # -- fewer ranks, and all of them again

    def _gone(self, faults: Sequence[Fault]) -> set[Place]:
        """The places on which no process will do, or that have no node to be on."""
        layout = self._layout
        starting = [
            layout.places[fault.rank]
            for fault in faults
            if fault.rank is not None and self._members[fault.rank].stage is Stage.STARTS
        ]
        homeless = {p for p in layout.places if p.node not in self._roster.seated}
        if len({place.node for place in homeless}) <= len(self._roster.waiting):
            homeless = set()
        return homeless | self._resizing.failing(starting)

    def _go_on_without(self, gone: set[Place], faults: Sequence[Fault]) -> bool:
        """Start all ranks anew on other places, fewer if need be; whether that can be."""
        size = self._resizing.without(gone, self._roster.seated)
        if size is None:
            return False
        for fault in faults:
            self._events.say(f"generation {self._generation}: {fault}; it cannot be replaced")
        self._resizing.tell(self._generation, self._world, size, sorted(gone))
        if self._repair is None:
            self._repair = Repair(list(faults))
        self._new_store()  # closes the one before
        places = self._resizing.places.choose(size.ranks)
        self._move(self._layout.on(places), {}, self._repair)
        return True

    def _lay_out(self, layout: Layout) -> None:
        """Let ranks be where `layout` says."""
        self._layout = self._roster.layout = layout
        self._world = layout.world

    def _move(self, layout: Layout, arrived: Mapping[int, Member], repair: Repair) -> None:
        """Start all ranks anew where `layout` says, but for those whose processes are there."""
        for member in self._members:
            if member.stage is not Stage.HOMELESS:
                self._send(member, "stop")
        self._lay_out(layout)
        self._health, self._memory = Health(), Memory()
        self._from_storage = True
        self._forget_snapshots()
        self._members = []
        for rank in range(self._world):
            if rank in arrived:
                self._members.append(arrived[rank])
                self._send(arrived[rank], "adopt", process=arrived[rank].process)
            else:
                self._members.append(Member(rank, self._new_process(), Stage.HOMELESS))
                self._start(self._members[rank])
        repair.replaced = set(range(self._world))
        self._remember()

    def _give(self, member: Member, command: str, store: TCPStore, /) -> None:
        """For `Growth`."""
        whole = self._layout.on(None)
        node = self._roster.seated[whole.node_of(member.rank)]
        if command == "drop":
            node.send("drop", process=member.process)
            return
        environment = self._environment(whole, member.rank, store)
        node.send("try", rank=member.rank, process=member.process, environment=environment)

    def _try_to_grow(self, now: float) -> None:
        """All ranks train: try lost places, and ask the ranks to give way when all are back."""
        if self._world == self._resizing.whole or not self._resizing.sizes.saved:
            return
        if self._roster.waiting:
            self._seat()
        self._growth.turn(now, self._roster.seated)
        if len(self._roster.seated) < self._layout.nnodes or not self._growth.is_complete:
            return
        if self._asked is None or now >= self._asked:
            self._asked = math.inf
            self._send(self._members[0], "grow")

    def _grow(self) -> None:
        """The state is saved, and all ranks wait to be ended."""
        size = self._resizing.sizes.of(self._resizing.whole)
        assert size is not None, "the run was started for it"
        self._resizing.tell(self._generation, self._world, size, [])
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
                self._send(member, "leave")
                member.stage = Stage.LEAVES
                member.deadline = time.monotonic() + patience
        self._new_store()  # closes the one before
        staying = {member.rank for member in kept}
        for member in list(self._members):
            if member.rank not in staying:
                self._replace(member, repair)
        if self._from_storage:
            self._forget_snapshots()
        self._remember()

    def _seat(self) -> None:
        """Let nodes that wait take the places of lost ones."""
        self._since = time.monotonic()
        for index in self._roster.seat():
            node = self._roster.seated[index]
            ranks = self._ranks_of(index)
            self._events.record("node replaced", node=index, name=node.name, ranks=ranks)
            shown = f"ranks {', '.join(map(str, ranks))}" if ranks else "no rank yet"
            self._events.say(
                f"generation {self._generation}: {node.name} is node {index} now, with {shown}"
            )

    def _forget_snapshots(self) -> None:
        self._epoch += 1
        for node in self._roster:
            node.held.clear()
            node.send("forget snapshots", epoch=self._epoch)

    def _advance(self) -> None:
        """Let a generation form when all are there; look after who does not come."""
        now = time.monotonic()
        repair = self._repair
        self._house(now)
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
        waiting = all(member.stage is Stage.WAITS for member in self._members)
        if self._lost is not None and (waiting or now - self._lost > _LOST_S):
            gone = [member for member in self._members if member.stage is Stage.ENDED]
            for member in gone:
                self._note(member, "ended before the others did", None, "", code=1, program=True)
            if not gone:
                waited = now - self._lost
                self._news.append(Fault(None, "lost a connection", None, detect_s=waited))
            self._lost = None
            return
        if waiting:
            self._form()
        if repair is None and all(member.stage is Stage.RUNS for member in self._members):
            self._try_to_grow(now)
            if not self._calm:
                self._calm = True
                self._look_ahead()
        if self._calm and now > self._next_count:
            self._next_count = now + _COUNT_S
            self._count_copies()

    def _house(self, now: float) -> None:
        """Start the ranks that have no process, as soon as there is a node for them."""
        homeless = [member for member in self._members if member.stage is Stage.HOMELESS]
        if not homeless:
            return
        if self._roster.waiting:
            self._seat()
        for member in homeless:
            if self._roster.of(member.rank) is not None:
                self._start(member)
        left = [member.rank for member in homeless if member.stage is Stage.HOMELESS]
        if left and now - self._since > self._patience_s:
            ranks = ", ".join(map(str, left))
            self._end = (
                Fault(None, f"waits for a node with ranks {ranks}", None),
                f"none has come within {self._patience_s:.0f} s",
            )

    def _look_ahead(self) -> None:
        """All ranks train: prepare for the next fault."""
        for node in self._roster:
            node.send("stand by", least=self._layout.nproc if node.index is None else 0)
        for node, source in self._roster.copies() if self._copies else ():
            ranks = [] if source is None or source.index is None else self._ranks_of(source.index)
            node.send("copy", address=None if source is None else source.address, ranks=ranks)

    def _count_copies(self) -> None:
        """Note the newest step that the loss of a node cannot take away."""
        copied = self._roster.newest_common(nodes=2)
        if copied is not None and copied != self._copied:
            self._copied = copied
            self._events.record("copied", generation=copied.generation, step=copied.step)

    def _form(self) -> None:
        """All ranks are there: they form the next generation."""
        common = None if self._from_storage else self._roster.newest_common()
        inside = [member.fit for member in self._members if member.fit is not None]
        self._generation += 1
        self._calm = False
        self._lost = None
        self._asked = None
        source, where = None, []
        if common is not None:
            holders = self._roster.holders(common)
            own = all(self._roster.of(rank) is node for rank, node in enumerate(holders))
            text = "memory" if own else "a neighbour's copy"
            source = {"mark": [common.generation, common.step], "text": text}
            where = [(rank, *node.address) for rank, node in enumerate(holders)]
        elif self._generation > 1 and not self._from_storage:
            self._events.say(
                f"generation {self._generation}: no snapshot is in memory of all ranks; state "
                "comes from storage, or the run from its beginning"
            )
        self._from_storage = False
        farthest = max(self._roster, key=lambda node: node.reached)
        for member in self._members:
            member.stage = Stage.JOINS
        self._remember()
        for node in self._roster.seated.values():
            node.send(
                "join",
                number=self._generation,
                host=self._host,
                port=self._store.port,
                source=source,
                where=where,
                journal=farthest.address if farthest is not node else None,
                last=inside[0].last if inside else None,
                reached=farthest.reached,
                may_grow=self._world < self._resizing.whole,
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
        elif fault.rank is None:
            text = str(fault)
        elif fault.what.startswith("ended"):
            text = f"Rank {fault.rank} failed with exit code {fault.code}"
        else:
            text = f"Rank {fault.rank} {fault.what}"
        self._events.say(f"{text}; the other ranks were stopped.")


def _in_its_ring(view: RankView | None, more: str) -> tuple[int | None, str]:
    """The step of a rank, and in words `more` and what it did last."""
    did = "" if view is None else what_it_did(view)
    step = None if view is None else view.step
    return step, ", ".join(text for text in (more, did) if text)
