"""What a controller decides about fewer ranks, and all of them again; agents are made of lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from msc.runtime.recovery import places
from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.controller import Controller
from msc.runtime.recovery.environment import HOST, Layout
from msc.runtime.recovery.events import Events, read_events
from msc.runtime.recovery.roster import Node

SIZES = [[4, 4, 1], [2, 2, 2], [1, 1, 4]]
FRESH: dict[str, Any] = {"memo": None, "ranks": []}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost places are tried again without waiting."""
    monkeypatch.setattr(places, "_FIRST_S", 0.0)


class Run:
    """A controller, and the commands that its nodes were given: (node, command, facts)."""

    def __init__(
        self,
        folder: Path,
        nnodes: int = 1,
        nproc: int = 4,
        budget: Budget | None = None,
        sizes: Sequence[Sequence[int]] = SIZES,
        saves: bool = True,
    ) -> None:
        self.folder = folder
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.processes: dict[int, tuple[Node, int]] = {}
        self.layout = Layout(nproc, nnodes, "run", 0)
        self.budget = budget or Budget(0, 0, 2)
        self.program = {"worlds": sizes, "saves": saves}
        self.new_controller()
        for number in range(nnodes):
            self.add_node(f"host{number}")
        self.controller.turn()

    def new_controller(self) -> None:
        self.controller = Controller(self.layout, HOST, self.budget, Events(self.folder))

    def add_node(self, name: str, state: dict[str, Any] | None = None) -> Node:
        def send(command: str, /, **facts: Any) -> None:
            self.sent.append((name, command, facts))
            if command == "start":
                self.processes[facts["rank"]] = node, facts["process"]
            elif command == "stop":
                del self.processes[facts["rank"]]
            elif command == "adopt":
                self.processes[facts["rank"]] = node, facts["process"]
            elif command == "read rings":
                node.rings = []

        node = Node(send, name)
        self.controller.joins(node, state or FRESH)
        return node

    def take(self, *commands: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """The commands of these kinds since this was asked last."""
        found = [each for each in self.sent if each[1] in commands]
        self.sent.clear()
        return iter(found)

    def report(self, node: Node, rank: int, process: int, event: str, **facts: Any) -> None:
        report = {"event": event, "rank": rank, "process": process, "step": None, "doing": ""}
        self.controller.hear(node, {**report, **facts})

    def tell(self, rank: int, what: str, **facts: Any) -> None:
        node, process = self.processes[rank]
        self.report(node, rank, process, "told", what=what, facts=facts)

    def exit(self, rank: int, code: int) -> None:
        node, process = self.processes[rank]
        self.report(node, rank, process, "exit", code=code, detect_s=0.1)
        self.controller.turn()

    def train(self) -> None:
        """All ranks come, meet and train."""
        for rank in list(self.processes):
            self.tell(rank, "program", **self.program)
            self.tell(rank, "ready", trainer=1)
        self.controller.turn()
        for rank in list(self.processes):
            self.tell(rank, "restored", load_s=0.1, source="storage", step=4)
            self.tell(rank, "fit", calls=1, last=10, stays=True)
        self.tell(0, "caught up", step=5)
        self.controller.turn()

    def tries(self) -> list[tuple[str, int, int, dict[str, str]]]:
        """Node, rank, process and environment of processes that are to be tried."""
        return [
            (node, facts["rank"], facts["process"], facts["environment"])
            for node, _, facts in self.take("try")
        ]

    def try_ready(self, node: Node, rank: int, process: int) -> None:
        facts = {"what": "ready", "facts": {"trainer": 1}}
        self.report(node, rank, process, "told", **facts)
        self.controller.turn()

    def told(self, event: str) -> list[dict[str, Any]]:
        return [each for each in read_events(self.folder) if each["event"] == event]

    @property
    def environments(self) -> list[dict[str, str]]:
        """Of the ranks that were started since this was asked last, in order."""
        return [facts["environment"] for _, _, facts in self.take("start")]


def some(found: dict[str, str], *names: str) -> tuple[str, ...]:
    return tuple(found[name] for name in names)


def test_without_a_budget_a_lost_rank_makes_the_run_smaller_and_its_slot_is_tried(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.train()
    run.take()
    run.exit(1, -9)
    started = run.environments
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MSC_FULL_WORLD_SIZE")
    assert [some(each, *names) for each in started] == [
        ("0", "0", "2", "2", "4"),
        ("1", "2", "2", "2", "4"),  # LOCAL_RANK names a device that is sound
    ]
    (told,) = run.told("ranks")
    assert (told["ranks"], told["of"], told["lost"]) == (2, 4, [[0, 1]])
    assert (told["dp"], told["micro_batches"]) == ([4, 2], [1, 2])

    run.train()
    assert next(run.take("join"))[2]["may_grow"]
    run.controller.turn()
    assert not run.tries()  # it is under way
    run.exit(1, -9)  # and another: 2 is the least, and slots 0 and 3 are sound
    assert [some(each, "RANK", "LOCAL_RANK") for each in run.environments] == [
        ("0", "0"),
        ("1", "3"),
    ]
    run.exit(0, -9)
    run.controller.turn()
    (gave_up,) = run.told("gave up")
    assert "1 are left, 2 are wanted, and its program runs on 4, 2, 1" in gave_up["why"]


def test_the_run_grows_back_when_a_process_on_the_lost_slot_waits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
    run.exit(1, -9)
    run.take()
    run.train()
    ((_, rank, process, environment),) = run.tries()
    assert some(environment, "RANK", "LOCAL_RANK", "WORLD_SIZE") == ("1", "1", "4")
    node = run.processes[0][0]
    run.report(node, rank, process, "exit", code=1, detect_s=0.1)
    run.controller.turn()
    commands = [(name, facts["process"]) for _, name, facts in run.take("drop", "try", "grow")]
    assert commands == [("drop", process), ("try", process + 1)]
    run.try_ready(node, rank, process + 1)
    assert [(name, facts["rank"]) for _, name, facts in run.take("grow")] == [("grow", 0)]
    run.controller.turn()
    assert not list(run.take("grow"))

    run.tell(0, "goes on", step=6)  # storage was full
    run.controller.turn()
    assert not list(run.take("grow"))
    run.tell(0, "gave way", step=7)
    commands = [(n, f["rank"]) for _, n, f in run.take("stop", "start", "adopt")]
    assert commands == [("stop", 0), ("stop", 1), ("start", 0), ("adopt", 1), *_starts(2, 3)]
    run.tell(1, "ready", trainer=1)
    run.train()
    (_, _, joined), *_ = run.take("join")
    assert (joined["may_grow"], joined["source"], joined["last"]) == (False, None, None)
    assert [each["ranks"] for each in run.told("ranks")] == [2, 4]
    assert not list(run.take("try", "grow"))


def _starts(*ranks: int) -> list[tuple[str, int]]:
    return [("start", rank) for rank in ranks]


def test_a_slot_whose_processes_end_before_they_meet_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, budget=Budget(10, 3, 1))
    run.train()
    run.exit(3, -9)
    run.exit(3, 1)
    assert not run.told("ranks")
    run.exit(3, 1)
    assert [each["lost"] for each in run.told("ranks")] == [[[0, 3]]]


def test_without_permission_it_ends_as_before(tmp_path: Path) -> None:
    run = Run(tmp_path, budget=Budget(1, 0))
    run.train()
    run.exit(3, -9)
    run.train()
    run.exit(3, -9)
    run.controller.turn()
    assert run.controller.code == 1
    (gave_up,) = run.told("gave up")
    assert gave_up["why"] == "all of its 1 replacements and 0 restarts are used"


def test_a_program_with_a_number_for_dp_says_why_it_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, sizes=[[4, 4, 1]])
    run.train()
    run.exit(3, -9)
    run.controller.turn()
    (gave_up,) = run.told("gave up")
    assert "runs on 4 only (compile it in the script, with mesh='dp=*,..')" in gave_up["why"]


def test_a_run_that_saves_nothing_does_not_grow(tmp_path: Path) -> None:
    run = Run(tmp_path, saves=False)
    run.train()
    run.exit(3, -9)
    run.train()
    run.controller.turn()
    assert not run.tries()


def test_a_lost_node_makes_the_run_smaller_and_one_that_joins_makes_it_whole(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, nnodes=2, nproc=2, budget=Budget(10, 3, 2))
    run.train()
    run.take()
    lost = run.processes[2][0]
    run.controller.loses(lost, "its agent has been silent", 2.5)
    run.processes = {rank: found for rank, found in run.processes.items() if rank < 2}
    run.controller.turn()
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [some(each, *names) for each in run.environments] == [
        ("0", "0", "0", "2", "1"),
        ("1", "1", "0", "2", "1"),
    ]
    run.train()
    assert not run.tries()
    node = run.add_node("host2")
    run.controller.turn()
    tries = run.tries()
    assert [(name, rank) for name, rank, _, _ in tries] == [("host2", 2), ("host2", 3)]
    for _, rank, process, environment in tries:
        assert some(environment, "GROUP_RANK", "LOCAL_WORLD_SIZE") == ("1", "2")
        run.try_ready(node, rank, process)
    assert [(name, facts["rank"]) for name, _, facts in run.take("grow")] == [("host0", 0)]
    run.tell(0, "gave way", step=7)
    found = [(n, c, f["rank"]) for n, c, f in run.take("start", "adopt")]
    assert found == [
        ("host0", "start", 0),
        ("host0", "start", 1),
        ("host2", "adopt", 2),
        ("host2", "adopt", 3),
    ]


def test_a_spare_that_waits_is_taken_before_the_run_becomes_smaller(tmp_path: Path) -> None:
    run = Run(tmp_path, nnodes=2, nproc=2, budget=Budget(10, 3, 2))
    run.controller._roster._spares = 1
    run.add_node("spare")
    run.train()
    run.take()
    run.controller.loses(run.processes[2][0], "its agent has been silent", 2.5)
    run.controller.turn()
    assert [(n, f["rank"]) for n, _, f in run.take("start")] == [("spare", 2), ("spare", 3)]
    assert not run.told("ranks")


def test_a_controller_that_is_started_anew_knows_which_places_are_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, nnodes=2, nproc=2)
    run.train()
    run.exit(1, -9)  # it goes on with both slots of node 1, so that no group spans two nodes
    places_of = {rank: node.name for rank, (node, _) in run.processes.items()}
    run.train()
    memo = list(run.take("remember"))[-1][2]["memo"]
    held = dict(run.processes)
    run.new_controller()
    for name in ("host0", "host1"):
        ranks = [
            {
                "rank": rank,
                "process": process,
                "stage": "runs",
                "trainer": 1,
                "fit": {"calls": 1, "last": 10, "stays": True},
                "told": "",
                "code": None,
            }
            for rank, (node, process) in held.items()
            if node.name == name
        ]
        run.add_node(name, {"memo": memo, "ranks": ranks})
    run.controller.turn()
    run.controller.turn()
    assert run.told("state re-learned")
    assert places_of == {0: "host1", 1: "host1"}
    commands = list(run.take("try", "start"))
    assert [(name, command, facts["rank"]) for name, command, facts in commands] == [
        ("host0", "try", 1)
    ]


def test_a_slot_that_is_bad_from_the_start_waits_for_the_others_to_tell_their_sizes(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.take()
    run.exit(3, 7)
    assert not run.environments  # no rank has told yet on how many its program runs
    run.tell(0, "program", **run.program)
    run.controller.turn()
    assert [some(each, "RANK", "WORLD_SIZE") for each in run.environments] == [
        ("0", "2"),
        ("1", "2"),
    ]


def test_with_a_restart_a_bad_slot_is_tried_once_more_and_then_left(tmp_path: Path) -> None:
    run = Run(tmp_path, budget=Budget(0, 1, 2))
    run.exit(3, 7)
    run.tell(0, "program", **run.program)
    run.take()
    run.controller.turn()
    assert len(run.environments) == 4
    run.exit(3, 7)
    assert len(run.environments) == 2
    (told,) = run.told("ranks")
    assert (told["ranks"], told["of"], told["lost"]) == (2, 4, [[0, 3]])


def test_a_script_that_fails_on_all_ranks_is_not_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in range(4):
        run.exit(rank, 7)
    assert run.controller.code is None
    run.controller.turn()
    assert run.controller.code == 7
    (gave_up,) = run.told("gave up")
    assert "no rank has told on how many its program can run" in gave_up["why"]
