"""The controller's decisions, with agents that only note what they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msc.runtime.diagnosis.blame import MISMATCH, Cause
from msc.runtime.recovery import controller
from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.controller import Controller
from msc.runtime.recovery.environment import HOST, Layout
from msc.runtime.recovery.events import Events, read_events
from msc.runtime.recovery.health import Health
from msc.runtime.recovery.roster import Node

NEW: dict[str, Any] = {"memo": None, "ranks": []}
FIT = {"calls": 1, "last": 9, "stays": True}


class Agent:
    """Notes commands; `ranks` are the processes that it was told to start."""

    def __init__(self, name: str, wish: int | None = None) -> None:
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.ranks: dict[int, int] = {}
        self.rings: list[dict[str, Any]] | None = []
        self.node = Node(self._send, name, (name, 1), wish)

    def _send(self, command: str, /, **facts: Any) -> None:
        facts = json.loads(json.dumps(facts))  # nothing else can be sent
        self.commands.append((command, facts))
        if command == "start":
            self.ranks[facts["rank"]] = facts["process"]
        if command == "read rings":
            self.node.rings = self.rings

    def told(self, command: str) -> list[dict[str, Any]]:
        """What it was told with a command, once."""
        found = [facts for name, facts in self.commands if name == command]
        self.commands = [each for each in self.commands if each[0] != command]
        return found


class Run:
    """A run of two nodes with two ranks each."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.budget = options.pop("budget", Budget(5, 1))
        layout = Layout(2, 2, "test", self.budget.restarts)
        options = {"spares": 1, "patience_s": 60.0} | options
        self.controller = Controller(layout, HOST, self.budget, Events(folder), **options)
        self.agents: list[Agent] = []

    def join(self, name: str, wish: int | None = None, state: Any = NEW) -> tuple[str, bool]:
        agent = Agent(name, wish)
        found = self.controller.joins(agent.node, state)
        if not found[0]:
            self.agents.append(agent)
        return found

    def tell(self, agent: Agent, rank: int, what: str, **facts: Any) -> None:
        at = {"rank": rank, "process": agent.ranks[rank], "step": None, "doing": ""}
        self.controller.hear(agent.node, {"event": "told", **at, "what": what, "facts": facts})

    def hold(self, agent: Agent, held: dict[int, list[tuple[int, int]]], epoch: int = 0) -> None:
        report = {"held": list(held.items()), "reached": 4, "epoch": epoch}
        self.controller.hear(agent.node, {"event": "snapshots", **report})

    def train(self) -> None:
        """All ranks come to be inside of `fit`."""
        for event, facts in (("ready", {"trainer": 1}), ("", {}), ("fit", FIT)):
            for agent in self.agents:
                for rank in agent.ranks if event else ():
                    self.tell(agent, rank, event, **facts)
            self.controller.turn()
        self.restored()

    def restored(self) -> None:
        for agent in self.agents:
            for rank in agent.ranks:
                self.tell(agent, rank, "restored", load_s=0.1, source="memory", step=4)
        self.controller.turn()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three nodes, one of which is a spare; all ranks train, and each node copies the other's."""
    made = Run(tmp_path)
    for name in ("one", "two", "three"):
        made.join(name)
    made.controller.turn()
    made.train()
    one, two, _ = made.agents
    made.hold(one, {rank: [(1, 2), (1, 4)] for rank in range(4)})
    made.hold(two, {rank: [(1, 4), (1, 6)] for rank in (2, 3)})
    return made


def test_ranks_are_started_on_their_nodes_when_all_have_come(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.join("last", 1)
    run.controller.turn()
    assert not run.agents[0].ranks
    run.join("first", 0)
    run.controller.turn()
    last, first = run.agents
    assert (list(first.ranks), list(last.ranks)) == ([0, 1], [2, 3])
    found = last.told("start")[1]["environment"]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [found[name] for name in names] == ["3", "1", "1", "2", "2"]


def test_nodes_that_are_too_many_or_of_equal_rank_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, spares=0)
    run.join("one", 1)
    assert run.join("other", 1) == ("there is a node with rank 1 already", False)
    run.join("two")
    run.controller.turn()
    assert list(run.agents[1].ranks) == [0, 1]
    assert "the run has all of its 2 nodes and 0 spares" in run.join("three")[0]


def test_too_few_nodes_end_a_run_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, patience_s=0.0)
    run.join("one")
    run.controller.turn()
    assert run.controller.code == 1
    assert "1 of 2 nodes have come" in capsys.readouterr().err


def test_a_spare_takes_a_lost_nodes_ranks_with_a_neighbours_copy(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = run.agents
    assert three.told("stand by")[-1] == {"least": 2}
    assert one.told("copy")[-1] == {"address": ["two", 1], "ranks": [2, 3]}
    run.controller.loses(two.node, "its agent died", 0.1)
    run.agents.remove(two)
    run.controller.turn()
    assert list(three.ranks) == [2, 3]
    assert [each["rank"] for each in one.told("leave")] == [0, 1]
    text = capsys.readouterr().err
    assert "generation 1: node 1 (two) with ranks 2, 3 is gone (its agent died)" in text
    assert "three is node 1 now, with ranks 2, 3" in text
    for agent in run.agents:
        for rank in agent.ranks:
            run.tell(agent, rank, "ready", trainer=1)
    three.told("join")
    run.controller.turn()
    (joined,) = three.told("join")
    assert joined["source"] == {"mark": [1, 4], "text": "a neighbour's copy"}
    assert joined["where"] == [[rank, "one", 1] for rank in range(4)]
    assert joined["journal"] == ["one", 1]
    assert (joined["number"], joined["last"]) == (2, 9)
    assert run.budget.replacements == 4  # a node counts as one


def test_a_node_without_a_spare_is_waited_for_and_then_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, patience_s=0.0)
    run.join("one")
    run.join("two")
    run.controller.turn()
    run.train()
    run.controller.loses(run.agents[1].node, "its agent died", 0.1)
    run.controller.turn()
    assert "no node waits that could be node 1" in capsys.readouterr().err
    for _ in range(2):
        run.controller.turn()
    assert run.controller.code == 1
    assert "waits for a node with ranks 2, 3; the run ends" in capsys.readouterr().err


def test_a_recovery_that_fails_each_time_uses_the_budget_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_LOST_S", -1.0)
    for left in (5, 4, 3):
        run.tell(run.agents[0], 0, "lost")
        for _ in range(2):
            run.controller.turn()
        assert run.budget.replacements == left


def test_what_a_process_tells_that_was_replaced_is_not_heard(run: Run) -> None:
    _, two, three = run.agents
    run.controller.loses(two.node, "its agent is silent", 2.5)
    run.controller.turn()
    three.ranks, new = two.ranks, three.ranks
    run.tell(three, 2, "failed", error="ValueError: late", step=3)
    run.controller.turn()
    assert [each["event"] for each in read_events(run.folder)].count("fault") == 1
    three.ranks = new
    run.tell(three, 2, "failed", error="ValueError: mine", step=3)
    run.controller.turn()
    assert read_events(run.folder)[-1]["what"] == "raised ValueError: mine"


def test_snapshots_that_were_thrown_away_are_not_counted_when_told_late(run: Run) -> None:
    one, *_ = run.agents
    run.tell(one, 0, "ready", trainer=2)
    assert one.told("forget snapshots")[-1] == {"epoch": 1}
    run.hold(one, {0: [(1, 2)]}, epoch=0)
    assert not one.node.held
    run.hold(one, {0: [(1, 2)]}, epoch=1)
    assert one.node.held


def test_another_controller_goes_on_where_the_first_was(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = []
    for agent in run.agents[:2]:
        memo = agent.told("remember")[-1]["memo"]
        ranks = [
            {"rank": r, "process": p, "stage": "runs", "trainer": 1, "fit": FIT}
            for r, p in agent.ranks.items()
        ]
        states.append({"memo": memo, "ranks": [r | {"told": "", "code": None} for r in ranks]})
    states[1]["ranks"][0]["code"] = -9  # which nobody has heard
    again = Run(tmp_path, budget=Budget(5, 1))
    for name, state, agent in zip(("one", "two"), states, run.agents, strict=False):
        assert again.join(name, state=state) == ("", True)
        again.agents[-1].ranks = dict(agent.ranks)
        again.tell(again.agents[-1], min(agent.ranks), "failed", error="ValueError: early", step=3)
    for _ in range(2):
        again.controller.turn()
    text = capsys.readouterr().err
    assert "generation 1: the controller was started anew; state re-learned from 2 of 2" in text
    assert "generation 1: rank 2 was killed (SIGKILL)" in text
    assert "generation 1: rank 0 raised ValueError: early in step 3" in text
    one, two = again.agents
    assert [each["rank"] for each in one.told("leave") + two.told("leave")] == [1, 3]
    assert [each["rank"] for each in one.told("start") + two.told("start")] == [0, 2]
    assert again.join("late", state=states[1]) == ("", False)  # others have its ranks


def test_a_crash_is_no_cause_where_another_rank_runs_another_program(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = run.agents
    cause = Cause(1, MISMATCH, "has all_gather where its program has all_reduce")
    monkeypatch.setattr(Health, "mismatches", lambda self, rings, world: [(cause, None)])
    for agent in (one, two):
        agent.rings = None  # they take their time
    code = {"rank": 3, "process": two.ranks[3], "step": 7, "doing": "", "detect_s": 0.1}
    run.controller.hear(two.node, {"event": "exit", "code": -11, **code})
    run.controller.turn()
    assert not [each for each in read_events(run.folder) if each["event"] == "fault"]
    for agent in (one, two):
        agent.rings = []  # of the second reading
        run.controller.hear(agent.node, {"event": "rings", "rings": []})
    run.controller.turn()
    run.controller.turn()
    found = [each for each in read_events(run.folder) if each["event"] == "fault"]
    assert [(each["rank"], each["what"]) for each in found] == [
        (1, MISMATCH),
        (3, "crashed (SIGSEGV)"),
    ]
    assert found[0]["doing"] == cause.detail
