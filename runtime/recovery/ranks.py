"""The ranks of a run: which process on which node each has, and what agents are told to do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from msc.ir.torch_private import TCPStore
from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.environment import Layout
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.members import Member, Stage
from msc.runtime.recovery.repair import Repair
from msc.runtime.recovery.roster import Roster

_PATIENCE = timedelta(minutes=5)
"""Of a store of a generation."""


class Ranks:
    """Those of `layout`, once `start_all` was called.

    host: where they find the store, which is in this process; members: by rank; generation: how
    often they have formed a group; epoch: how often all snapshots in memory were thrown away;
    processes: how many the run has had; since: when nodes were waited for last.
    """

    def __init__(
        self, layout: Layout, host: str, budget: Budget, events: Events, spares: int
    ) -> None:
        self.layout = layout
        self.host = host
        self.roster = Roster(layout, spares)
        self.members: list[Member] = []
        self.generation = 0
        self.epoch = 0
        self.processes = 0
        self.since = time.monotonic()
        self.store = self.another_store()
        self._budget = budget
        self._first_restarts = budget.restarts
        self._events = events

    @property
    def world(self) -> int:
        """How many there are."""
        return self.layout.world

    def say(self, text: str) -> None:
        """Tell the user, with the generation."""
        self._events.say(f"generation {self.generation}: {text}")

    def are_all(self, *stages: Stage) -> bool:
        """Whether each is in one of these stages."""
        return all(member.stage in stages for member in self.members)

    @property
    def train(self) -> bool:
        """Whether all are inside of `fit`."""
        return self.are_all(Stage.RUNS) and all(m.fit is not None for m in self.members)

    def on_node(self, index: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank in range(self.world) if self.layout.node_of(rank) == index]

    # -- stores and processes

    def another_store(self) -> TCPStore:
        """A store in this process, for ranks that find it at `host`."""
        return TCPStore(self.host, 0, None, True, _PATIENCE, False)

    def new_process(self) -> int:
        """The number of a process that is about to be started."""
        self.processes += 1
        return self.processes

    def environment(self, layout: Layout, rank: int, store: TCPStore) -> dict[str, str]:
        """What the process of a rank finds."""
        restarts = self._first_restarts - self._budget.restarts
        return layout.environment(rank, self.host, store.port, restarts)

    def send(self, member: Member, command: str, **facts: Any) -> None:
        """Tell the agent of a rank's node."""
        node = self.roster.of(member.rank)
        if node is not None:  # else it was lost just now, which is told next
            node.send(command, rank=member.rank, **facts)

    def start_all(self) -> None:
        """Start every rank; all nodes are there."""
        self.members = [Member(rank, self.new_process()) for rank in range(self.world)]
        for member in self.members:
            self._start(member)

    def _start(self, member: Member) -> None:
        environment = self.environment(self.layout, member.rank, self.store)
        self.send(member, "start", process=member.process, environment=environment)
        member.stage = Stage.STARTS

    def replace(self, member: Member, repair: Repair) -> None:
        """Give a rank to another process, as soon as there is a node for it."""
        repair.replaced.add(member.rank)
        member = Member(member.rank, self.new_process(), Stage.HOMELESS)
        self.members[member.rank] = member
        if self.roster.of(member.rank) is not None:
            self._start(member)

    def forget_snapshots(self) -> None:
        """Nobody is to use what is in memory so far."""
        self.epoch += 1
        for node in self.roster:
            node.held.clear()
            node.send("forget snapshots", epoch=self.epoch)

    # -- nodes

    def seat(self) -> None:
        """Let nodes that wait take the places of lost ones."""
        self.since = time.monotonic()
        for index in self.roster.seat():
            node = self.roster.seated[index]
            ranks = self.on_node(index)
            self._events.record("node replaced", node=index, name=node.name, ranks=ranks)
            shown = f"ranks {', '.join(map(str, ranks))}" if ranks else "no rank yet"
            self.say(f"{node.name} is node {index} now, with {shown}")

    def house(self) -> list[int]:
        """Start the ranks that have no process, as soon as there is a node; those still without."""
        homeless = [member for member in self.members if member.stage is Stage.HOMELESS]
        if homeless and self.roster.waiting:
            self.seat()
        for member in homeless:
            if self.roster.of(member.rank) is not None:
                self._start(member)
        return [member.rank for member in homeless if member.stage is Stage.HOMELESS]

    # -- from one generation to the next

    def take_apart(self, kept: Sequence[Member], repair: Repair, patience_s: float) -> None:
        """Let these leave their group within `patience_s`, and replace all others."""
        for member in kept:
            if member.stage in (Stage.RUNS, Stage.JOINS):
                self.send(member, "leave")
                member.stage = Stage.LEAVES
                member.deadline = time.monotonic() + patience_s
        self.store = self.another_store()  # closes the one before
        staying = {member.rank for member in kept}
        for member in list(self.members):
            if member.rank not in staying:
                self.replace(member, repair)

    def lay_out(self, layout: Layout) -> None:
        """Let ranks be where `layout` says."""
        self.layout = self.roster.layout = layout

    def move(
        self, layout: Layout, store: TCPStore, arrived: Mapping[int, Member], repair: Repair
    ) -> None:
        """Start all anew where `layout` says, but for those whose processes are there."""
        for member in self.members:
            if member.stage is not Stage.HOMELESS:
                self.send(member, "stop")
        self.store = store  # closes the one before
        self.lay_out(layout)
        self.forget_snapshots()
        self.members = []
        for rank in range(self.world):
            if rank in arrived:
                self.members.append(arrived[rank])
                self.send(arrived[rank], "adopt", process=arrived[rank].process)
            else:
                self.members.append(Member(rank, self.new_process(), Stage.HOMELESS))
                self._start(self.members[rank])
        repair.replaced = set(range(self.world))
