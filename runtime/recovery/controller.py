"""The controller of a run: what its ranks are to do, and what is done when some are lost.

It has no process and no file of theirs. Agents, one a node (`node.py`), tell it what they see
(`Controller.hear`), and are told what to do.

Ranks form a group again and again; each time is a *generation*, with a store of its own, so that no
rank reads what an earlier one has written, and a process that was given up finds nobody. After a
fault the ranks that are inside of `Trainer.fit` leave their group and keep their processes; others
are replaced. When all are there, the controller says which step all have in memory, and they go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msc.ir.torch_private import TCPStore
from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.environment import Layout
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.faults import Fault, Memory, of_exit
from msc.runtime.recovery.forming import form
from msc.runtime.recovery.growth import Growth
from msc.runtime.recovery.members import Fit, Member, Stage
from msc.runtime.recovery.places import Place
from msc.runtime.recovery.preparation import Preparation
from msc.runtime.recovery.ranks import Ranks
from msc.runtime.recovery.repair import Repair
from msc.runtime.recovery.resizing import Resizing
from msc.runtime.recovery.roster import Node
from msc.runtime.recovery.succession import Succession
from msc.runtime.recovery.watch import Watch

_LEAVE_S = 2.0
"""How long a rank may take to come out of its group, or the time of two of its steps."""
_LOST_S = 1.0
"""How long a lost connection waits for the fault that explains it."""
_RETURN_S = 10.0
"""How long a controller that was started anew waits for the nodes of the one before."""


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
        self._budget = budget
        self._first_budget = replace(budget)
        self._recovers = budget.recovers
        self._patience_s = patience_s
        self._events = events
        self._ranks = ranks = Ranks(layout, host, budget, events, spares)
        self._roster = ranks.roster
        self._watch = Watch(ranks)
        self._preparation = Preparation(ranks, copies, events)
        self._resizing = Resizing(layout.full, budget.least, events)
        self._growth = Growth(self._resizing.places, ranks, events)
        self._succession = Succession(ranks, budget, self._resizing)
        self._memory = Memory()
        self._early: list[tuple[Node, dict[str, Any]]] = []  # told before the run began
        self._news: list[Fault] = []
        self._lost: float | None = None
        self._repair: Repair | None = None
        self._from_storage = False
        self._repeated = 0
        self._speaking: dict[int, Node] = {}  # processes that have yet to say what failed
        self._end: tuple[Fault, str] | None = None

    def turn(self) -> None:
        """Act on what was heard; to be called again and again, some times in a second."""
        if self._end is not None:
            if not self._speaking:  # which the last word here explains
                self._give_up(*self._end)
            return
        if not self._ranks.members:
            self._gather()
            while self._ranks.members and self._early:
                self.hear(*self._early.pop(0))
            return
        if self._all_train():
            self._news += self._watch.look()
        if self._news:
            faults = self._watch.first_causes(self._news) if self._recovers else self._news
            early = faults and self._resizing.will_learn(self._ranks, faults, self._patience_s)
            if faults is not None and not early:
                self._news = []
                self._begin_repair(faults)
        elif self._ranks.are_all(Stage.ENDED):
            self.code = 0
        else:
            self._advance()

    # -- nodes

    def joins(self, node: Node, state: Mapping[str, Any]) -> tuple[str, bool]:
        """A node's agent has come: why it cannot be one of the run, and whether it keeps its ranks.

        state: see `NodeAgent.state`. It keeps them if it had them of a controller before this one;
        those of a node that was given up have other processes.
        """
        if state["memo"] is not None and not self._ranks.members:
            self._succession.returns(node, state)
            self._ranks.since = time.monotonic()
            return "", True
        refusal = self._roster.refusal(node)
        if not refusal:
            self._roster.waiting.append(node)
            node.send("forget snapshots", epoch=self._ranks.epoch)
            if self._ranks.members:
                self._preparation.is_disturbed()
                self._events.record("node joined", node=node.name)
        return refusal, False

    def loses(self, node: Node, why: str, detect_s: float) -> None:
        """A node's agent is gone, and its ranks with it."""
        self._succession.forget(node)
        self._speaking = {p: n for p, n in self._speaking.items() if n is not node}
        name = str(node)
        self._roster.remove(node)
        if node.index is not None:
            self._growth.lose(node.index, time.monotonic())
        if node.index is None or not self._ranks.on_node(node.index):
            self._events.say(f"{name} is gone ({why})")
            return
        self._lose(node.index, name, why, detect_s)

    def _lose(self, index: int, name: str, why: str, detect_s: float) -> None:
        members = [self._ranks.members[rank] for rank in self._ranks.on_node(index)]
        lost = tuple(each.rank for each in members if each.stage is not Stage.ENDED)
        if lost:
            step = self._watch.health.step_of(lost) or None
            what = f"is gone ({why})"
            self._news.append(Fault(None, what, step, detect_s=detect_s, node=name, lost=lost))

    def _gather(self) -> None:
        """Start all ranks when all nodes are there."""
        ranks, wanted = self._ranks, self._ranks.layout.nnodes
        late = time.monotonic() - ranks.since
        if self._succession.returned:
            if self._succession.returned == wanted or late > _RETURN_S:
                self._take_over()
        elif self._roster.is_complete():
            self._roster.seat()
            ranks.start_all()
            self._succession.remember()
            for node in self._roster.waiting:
                node.send("stand by", least=ranks.layout.nproc)
        elif late > self._patience_s:
            self.code = 1
            self._events.say(
                f"{len(self._roster.waiting)} of {wanted} nodes have come within {late:.0f} s; "
                "the run ends. Start msc run on each node, with the same --rdzv and --rdzv-id."
            )

    def _take_over(self) -> None:
        """Go on where another controller was, by what the agents of its nodes say."""
        ranks, nodes = self._ranks, self._succession.returned
        for state in self._succession.take_over():
            member = ranks.members[state["rank"]]
            if state["told"] and self._recovers:
                member.told = state["told"]
                self._news.append(member.fault(f"raised {member.told}", None, "", program=True))
            elif state["code"] is not None:
                self._exited(member, state["code"], None, "", 0.0)
        for index in range(ranks.layout.nnodes):
            if index not in self._roster.seated:
                why = "it has not come back to a controller that was started anew"
                self._lose(index, f"node {index}", why, _RETURN_S)
        if not ranks.are_all(Stage.RUNS, Stage.ENDED, Stage.HOMELESS):
            what = "was between two generations when its controller was lost"
            self._news.append(Fault(None, what, None))
        self._events.record("state re-learned", generation=ranks.generation, nodes=nodes)
        ranks.say(
            "the controller was started anew; state re-learned from "
            f"{nodes} of {ranks.layout.nnodes} nodes"
        )

    # -- what agents tell

    def hear(self, node: Node, report: dict[str, Any]) -> None:
        """Take note of a report of a node's agent."""
        if not self._ranks.members:
            self._early.append((node, report))
            return
        event = report.pop("event")
        if event == "snapshots":
            if report["epoch"] == self._ranks.epoch:
                node.holds(report["held"], report["reached"])
        elif event == "steps":
            if self._all_train():
                self._watch.health.hear(dict(report["steps"]))
        elif event == "rings":
            node.rings = report["rings"]
        elif event == "standby":
            self._events.record("standby is warm", pid=report["pid"])
        elif event == "standby lost":
            self._preparation.is_disturbed()
            self._events.record("standby ended")
            then = "another is started" if report["warm"] else "there is no new one"
            self._events.say(f"a standby process ended before it was needed; {then}")
        elif event == "silent":
            self._speaking.pop(report["process"], None)
        else:
            self._hear_of_process(node, event, report)

    def _hear_of_process(self, node: Node, event: str, report: dict[str, Any]) -> None:
        rank, process = report["rank"], report["process"]
        what = report["what"] if event == "told" else event
        if self._growth.hear(process, what, report.get("facts", {}), time.monotonic()):
            return
        if rank >= self._ranks.world or self._ranks.members[rank].process != process:
            return  # the rank is another process's now
        if event == "started":
            if self._repair is not None:
                self._repair.standbys += report["stood_by"]
            return
        member, step, doing = self._ranks.members[rank], report["step"], report["doing"]
        if event == "exit":
            self._exited(member, report["code"], step, doing, report["detect_s"])
        elif event == "frozen":
            what = "is frozen (it was stopped)"
            self._news.append(member.fault(what, step, doing, detect_s=report["detect_s"]))
        elif event == "told":
            if what == "failed" and not member.told and self._recovers:
                self._speaking[process] = node
            self._told(member, what, report["facts"], step, doing)

    def _exited(
        self, member: Member, code: int, step: int | None, doing: str, detect_s: float
    ) -> None:
        if code == 0 and member.fit is None:
            member.stage = Stage.ENDED
            return
        what, program = of_exit(code)
        facts = {"code": code if code > 0 else 1, "program": program, "detect_s": detect_s}
        self._news.append(member.fault(what, step, doing, **facts))

    def _told(
        self, member: Member, event: str, facts: dict[str, Any], step: int | None, doing: str
    ) -> None:
        """What a rank tells."""
        if event == "ready":
            member.trainer = facts["trainer"]
            if member.trainer > 1:
                self._ranks.forget_snapshots()  # they are of the Trainer before
            if member.stage in (Stage.RUNS, Stage.JOINS) and member.fit is not None:
                self._lost = self._lost or time.monotonic()  # it came out by itself
            member.stage = Stage.WAITS
            self._resizing.places.met(self._ranks.layout.places[member.rank])
        elif event == "program":
            self._resizing.sizes.hear(**facts)
        elif event == "gave way":
            self._grow()
        elif event == "goes on":
            self._growth.is_put_off(time.monotonic())
            self._ranks.say(
                f"step {facts['step']} was not saved, so that the run does not grow back now"
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
            self._news.append(member.fault(facts["why"], step, doing, restart=True))
        elif event == "failed" and not member.told:
            member.told = facts["error"]
            if self._recovers:
                at = step if facts["step"] is None else facts["step"]
                final = facts.get("final", False)
                fault = member.fault(f"raised {member.told}", at, doing, program=True, final=final)
                self._news.append(fault)
        elif event == "caught up":
            if self._repair is not None:
                self._repair.caught_up = facts["step"]
                self._finish_repair(self._repair)
        elif event == "mismatch" and facts["step"] > self._repeated:
            self._repeated = facts["step"]  # each node tells it
            self._events.record("mismatch", generation=self._ranks.generation, **facts)
            self._ranks.say(
                f"step {facts['step']} was repeated and its loss is {facts['found']!r}; the first "
                f"time it was {facts['recorded']!r}. The run is not what it was before the fault."
            )

    def _restored(self, member: Member, facts: Mapping[str, Any]) -> None:
        member.stage = Stage.RUNS
        repair = self._repair
        if repair is not None:
            repair.load_s = max(repair.load_s, facts["load_s"])
            repair.source = facts["source"]
            repair.step = facts["step"]
        if self._ranks.are_all(Stage.RUNS):
            self._watch.health.begin(facts["step"])
            if repair is not None:
                repair.restored = time.monotonic()
                self._finish_repair(repair)

    def _finish_repair(self, repair: Repair) -> None:
        """The run is where it was, if all ranks have said so."""
        if repair.caught_up is not None and repair.restored:
            self._repair = None
            repair.tell(self._ranks.generation, self._events)

    # -- repair

    def _begin_repair(self, faults: Sequence[Fault]) -> None:
        self._lost = None
        self._preparation.is_disturbed()
        for fault in faults:
            self._events.record("fault", generation=self._ranks.generation, **vars(fault))
        dead = {fault.rank for fault in faults if fault.rank is not None}
        cost = len(dead) + len([fault for fault in faults if fault.lost])
        if not cost and self._repair is not None:
            cost = 1  # else what fails in a recovery each time would be tried for ever
        dead.update(*(fault.lost for fault in faults))
        hopeless = self._memory.hopeless(faults) if self._recovers else ""
        gone = self._resizing.gone(self._ranks, faults)
        if not any(fault.final for fault in faults) and self._go_on_without(gone, faults):
            return
        if not self._recovers or hopeless:
            self._end = faults[0], hopeless
            return
        kept = [m for m in self._ranks.members if m.rank not in dead and m.can_go_on()]
        useful = kept or self._roster.newest_common() is not None
        useful = useful and self._ranks.generation > 0 and not any(f.restart for f in faults)
        if useful and cost <= self._budget.replacements:
            self._budget.replacements -= cost
            then = "replaced" if dead else "all meet again"
        elif self._budget.restarts:
            self._budget.restarts -= 1
            kept = []
            self._from_storage = True
            then = "all ranks are started anew, from storage if a step was saved"
        else:
            gone = {self._ranks.layout.places[rank] for rank in dead}
            if not self._go_on_without(gone, faults):
                first = self._first_budget
                why = f"all of its {first.replacements} replacements and {first.restarts} restarts"
                self._end = faults[0], f"{why} are used{self._resizing.why_not(len(gone))}"
            return
        for fault in faults:
            self._ranks.say(f"{fault}; {then}")
        self._take_apart(kept, faults)

    def _take_apart(self, kept: Sequence[Member], faults: Sequence[Fault]) -> None:
        """End the generation: the ranks of `kept` leave it, the others are replaced."""
        ranks = self._ranks
        ranks.seat()
        for index in range(ranks.layout.nnodes):
            if index not in self._roster.seated:
                ranks.say(
                    f"no node waits that could be node {index}; one is waited for, "
                    f"{self._patience_s:.0f} s at most"
                )
        patience = max(_LEAVE_S, 2 * self._watch.health.slow_step_s())
        ranks.take_apart(kept, self._the_repair(faults), patience)
        if self._from_storage:
            ranks.forget_snapshots()
        self._succession.remember()

    def _the_repair(self, faults: Sequence[Fault]) -> Repair:
        """The one that goes on, else one that begins with these."""
        self._repair = self._repair or Repair(list(faults))
        return self._repair

    def _advance(self) -> None:
        """Let a generation form when all are there; look after who does not come."""
        now = time.monotonic()
        ranks, repair = self._ranks, self._repair
        homeless = ranks.house()
        if homeless and now - ranks.since > self._patience_s:
            shown = ", ".join(map(str, homeless))
            fault = Fault(None, f"waits for a node with ranks {shown}", None)
            self._end = fault, f"none has come within {self._patience_s:.0f} s"
        for member in list(ranks.members):
            if member.stage is Stage.LEAVES and now > member.deadline and repair is not None:
                ranks.say(
                    f"rank {member.rank} does not come out of its group; its process is killed, "
                    "and the rank replaced"
                )
                ranks.replace(member, repair)
        leaving = any(member.stage is Stage.LEAVES for member in ranks.members)
        if repair is not None and not repair.left and not leaving:
            repair.left = now
        waiting = ranks.are_all(Stage.WAITS)
        if self._lost is not None and (waiting or now - self._lost > _LOST_S):
            self._explain_loss(now - self._lost)
            self._lost = None
            return
        if waiting:
            self._form()
        if repair is None and ranks.are_all(Stage.RUNS):
            self._try_to_grow(now)
            self._preparation.turn(now)

    def _explain_loss(self, waited: float) -> None:
        """A connection was lost, and no fault has come to explain it."""
        gone = [member for member in self._ranks.members if member.stage is Stage.ENDED]
        what = "ended before the others did"
        self._news += [member.fault(what, None, "", code=1, program=True) for member in gone]
        if not gone:
            self._news.append(Fault(None, "lost a connection", None, detect_s=waited))

    def _form(self) -> None:
        """All ranks are there: they form the next generation."""
        self._preparation.is_disturbed()
        self._growth.may_ask()
        self._lost = None
        may_grow = self._ranks.world < self._resizing.whole
        form(self._ranks, self._from_storage, may_grow, self._succession.remember)
        self._from_storage = False
        if self._repair is not None:
            self._repair.joined = time.monotonic()
            self._repair.load_s = self._repair.restored = 0.0
            self._repair.caught_up = None

    # -- fewer ranks, and all of them again

    def _go_on_without(self, gone: set[Place], faults: Sequence[Fault]) -> bool:
        """Start all ranks anew on other places, fewer if need be; whether that can be."""
        ranks = self._ranks
        size = self._resizing.without(gone, self._roster.seated)
        if size is None:
            return False
        for fault in faults:
            ranks.say(f"{fault}; it cannot be replaced")
        self._resizing.tell(ranks.generation, ranks.world, size, sorted(gone))
        places = self._resizing.places.choose(size.ranks)
        self._the_repair(faults)
        self._move(ranks.layout.on(places), ranks.another_store(), {})
        return True

    def _try_to_grow(self, now: float) -> None:
        """All ranks train: let lost places come back."""
        ranks = self._ranks
        if ranks.world == self._resizing.whole or not self._resizing.sizes.saved:
            return
        if self._roster.waiting:
            ranks.seat()
        self._growth.turn(now)

    def _grow(self) -> None:
        """The state is saved, and all ranks wait to be ended."""
        ranks = self._ranks
        size = self._resizing.sizes.of(self._resizing.whole)
        assert size is not None, "the run was started for it"
        self._resizing.tell(ranks.generation, ranks.world, size, [])
        self._news.clear()
        self._lost = None
        self._repair = Repair([])
        self._move(ranks.layout.on(None), *self._growth.take())

    def _move(self, layout: Layout, store: TCPStore, arrived: Mapping[int, Member]) -> None:
        assert self._repair is not None
        self._watch.begin_anew()
        self._memory = Memory()
        self._from_storage = True
        self._ranks.move(layout, store, arrived, self._repair)
        self._succession.remember()

    # -- the end

    def _all_train(self) -> bool:
        """Whether all ranks are inside of `fit`, with nothing wrong so far."""
        return self._recovers and not self._news and self._ranks.train

    def _give_up(self, fault: Fault, why: str) -> None:
        self.code = fault.code
        generation = self._ranks.generation
        self._events.record("gave up", generation=generation, why=why, **vars(fault))
        if self._recovers:
            text = f"generation {generation}: {fault}; the run ends, since {why}"
        else:
            text = fault.alone()
        self._events.say(f"{text}; the other ranks were stopped.")
