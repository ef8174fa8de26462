"""How a controller that takes another's place learns what that one knew.

Agents keep a note of what cannot be seen (`remember`), and know which of their processes has which
rank (`NodeAgent.state`); both come back with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.members import Fit, Member, Stage
from msc.runtime.recovery.places import Place
from msc.runtime.recovery.ranks import Ranks
from msc.runtime.recovery.resizing import Resizing
from msc.runtime.recovery.roster import Node

State = Mapping[str, Any]


class Succession:
    """Of the controller of `ranks`, which has `budget` and `resizing`.

    returned: how many agents of the controller before have come.
    """

    def __init__(self, ranks: Ranks, budget: Budget, resizing: Resizing) -> None:
        self._ranks = ranks
        self._budget = budget
        self._resizing = resizing
        self._memos = 0
        self._returned: list[tuple[Node, State]] = []

    @property
    def returned(self) -> int:
        """How many nodes of the controller before have come."""
        return len(self._returned)

    def returns(self, node: Node, state: State) -> None:
        """An agent of the controller before has come."""
        self._returned.append((node, state))

    def forget(self, node: Node) -> None:
        """It has gone again."""
        self._returned = [each for each in self._returned if each[0] is not node]

    def remember(self) -> None:
        """Have agents keep what a controller must know that takes this one's place."""
        self._memos += 1
        ranks = self._ranks
        memo = {
            "number": self._memos,
            "generation": ranks.generation,
            "epoch": ranks.epoch,
            "processes": ranks.processes,
            "replacements": self._budget.replacements,
            "restarts": self._budget.restarts,
            "places": ranks.layout.chosen,
            "resizing": self._resizing.to_data(),
        }
        for node in ranks.roster.seated.values():
            node.send("remember", memo=memo)

    def take_over(self) -> list[State]:
        """Go on where the other controller was; what the agents say of each rank."""
        returned, self._returned = self._returned, []
        self._learn(max((s["memo"] for _, s in returned), key=lambda memo: memo["number"]))
        ranks = self._ranks
        ranks.members = [
            Member(rank, ranks.new_process(), Stage.HOMELESS) for rank in range(ranks.world)
        ]
        states: list[State] = []
        for node, state in returned:
            node.send("drop", process=None)  # the store that those know is gone
            if not state["ranks"]:
                ranks.roster.waiting.append(node)
                continue
            ranks.roster.place(node, ranks.layout.node_of(state["ranks"][0]["rank"]))
            states += state["ranks"]
        for found in states:
            fit = None if found["fit"] is None else Fit(**found["fit"])
            stage, rank = Stage(found["stage"]), found["rank"]
            ranks.members[rank] = Member(rank, found["process"], stage, found["trainer"], fit)
        return states

    def _learn(self, memo: Mapping[str, Any]) -> None:
        ranks, budget = self._ranks, self._budget
        self._memos, ranks.generation = memo["number"], memo["generation"]
        ranks.epoch, ranks.processes = memo["epoch"], memo["processes"]
        budget.replacements, budget.restarts = memo["replacements"], memo["restarts"]
        if memo["places"] is not None:
            ranks.lay_out(ranks.layout.on([Place(*place) for place in memo["places"]]))
        self._resizing.learn(memo["resizing"])
