"""Events name rank and node, once, and say when it is over; sound ranks raise none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from msc.runtime.monitor.beat import Beat, RankBeat
from msc.runtime.monitor.watch import (
    LOG,
    MISSED,
    PORT,
    PROCESS,
    RECOVERED,
    STEP_TIME,
    TRAFFIC,
    Event,
    Watch,
)

PER_NODE = 8


class Job:
    """Synthetic nodes that beat once a second; `change` edits a rank's beat, or drops the node's.

    Each rank takes a step in `step_s` seconds.
    """

    def __init__(self, nodes: int, step_s: float = 0.25) -> None:
        self.nodes = nodes
        self.step_s = step_s
        self.watch = Watch()
        self.now = 0
        self.steps = 0.0
        self.lines: dict[int, tuple[str, ...]] = {}
        self.errors: dict[int, int] = {}
        self.factor = 1

    def beat(self, node: int, change: Callable[[RankBeat], RankBeat]) -> Beat:
        step = int(self.steps)
        ranks = []
        for rank in range(node * PER_NODE, (node + 1) * PER_NODE):
            counts = {"tp": 10 * step, "forward": 2 * step}
            last = "wait tp:0,1"
            ranks.append(change(RankBeat(rank, "running", "step", step, 0.0, last, counts)))
        moved = 1000 * step * self.factor
        ports = {"eth0": (moved, moved, self.errors.get(node, 0))}
        return Beat(f"n{node}", float(self.now), tuple(ranks), ports, self.lines.get(node, ()))

    def run(
        self,
        seconds: int,
        change: Callable[[RankBeat], RankBeat] = lambda rank: rank,
        silent: Sequence[int] = (),
    ) -> list[Event]:
        found = []
        for _ in range(seconds):
            for node in range(self.nodes):
                if node not in silent:
                    sent = self.beat(node, change)
                    found += self.watch.hear(Beat.from_bytes(sent.to_bytes()), self.now)
            found += self.watch.late(self.now)
            self.now += 1
            self.steps += 1 / self.step_s
        return found


def kinds(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    return [(event.kind, event.node, event.rank) for event in events]


def frozen(ranks: Sequence[int], step: int, waits: Sequence[int] = ()) -> Callable[..., RankBeat]:
    """These ranks stay in a step; those in `waits` wait for a minute."""

    def change(rank: RankBeat) -> RankBeat:
        if rank.rank not in ranks:
            return rank
        return rank._replace(step=step, waits_s=60.0 if rank.rank in waits else 0.0)

    return change


@pytest.mark.parametrize("step_s", [0.05, 0.25, 0.9, 7.0])
def test_sound_ranks_raise_nothing(step_s: float) -> None:
    job = Job(4, step_s)
    assert job.run(400) == []
    assert job.watch.ranks == 32


def test_a_silent_node_is_told_rank_by_rank_once_and_so_is_its_return() -> None:
    job = Job(3)
    assert job.run(5) == []
    found = job.run(20, silent=[1])
    assert kinds(found) == [(MISSED, "n1", rank) for rank in range(8, 16)]
    assert found[0].detail == "none for 4.0 s, last in step 16"
    assert str(found[0]).startswith("missed beats: rank 8 on n1: none for")
    assert kinds(job.run(5)) == [(RECOVERED, "n1", rank) for rank in range(8, 16)]


def test_two_lost_beats_are_nothing() -> None:
    job = Job(2)
    for _ in range(10):
        assert job.run(3) + job.run(2, silent=[1]) == []


@pytest.mark.parametrize("state", ["dead", "stopped"])
def test_a_process_that_is_gone_is_told_with_what_it_did_last(state: str) -> None:
    job = Job(2)
    job.run(3)
    found = job.run(3, lambda rank: rank._replace(state=state) if rank.rank == 9 else rank)
    assert kinds(found) == [(PROCESS, "n1", 9)]
    assert found[0].detail == f"{state} in step 12, phase step, last wait tp:0,1"
    assert kinds(job.run(1)) == [(RECOVERED, "n1", 9)]


def test_a_process_that_has_ended_as_it_should_is_nothing() -> None:
    job = Job(1)
    job.run(3)
    assert job.run(3, lambda rank: rank._replace(state="dead", phase="ended")) == []


def test_steps_that_take_longer_are_told_once() -> None:
    job = Job(1)
    assert job.run(60) == []
    job.step_s = 0.5
    slow = job.run(60)
    assert kinds(slow) == [(STEP_TIME, "n0", rank) for rank in range(8)]
    assert slow[0].detail == "seconds a step: 0.5, usually 0.25"
    job.step_s = 0.25
    assert kinds(job.run(30)) == [(RECOVERED, "n0", rank) for rank in range(8)]


def test_who_does_not_wait_in_a_step_that_lasts_is_told_and_its_victims_are_not() -> None:
    job = Job(2)
    job.run(60)
    ranks = range(16)
    found = job.run(30, frozen(ranks, 237, waits=[r for r in ranks if r != 5]))
    assert kinds(found) == [(STEP_TIME, "n0", 5)]
    assert found[0].detail == "step 237 lasts 4.0 s, usually 0.25 s; phase step"
    assert (RECOVERED, "n0", 5) in kinds(job.run(1))


def test_where_all_wait_one_is_told() -> None:
    job = Job(2)
    job.run(60)
    found = job.run(30, frozen(range(16), 237, waits=range(16)))
    assert kinds(found) == [(STEP_TIME, "n0", 0)]
    assert "all ranks wait, it in wait tp:0,1" in found[0].detail


def test_traffic_that_is_not_the_programs_is_told_with_its_axis() -> None:
    job = Job(1)
    job.run(60)

    def more(rank: RankBeat) -> RankBeat:
        if rank.rank != 3:
            return rank
        started = {**rank.started, "tp": rank.started["tp"] + (rank.step - 240) * 5}
        return rank._replace(started=started)

    found = job.run(20, more)
    assert kinds(found) == [(TRAFFIC, "n0", 3)]
    assert found[0].detail == "communications a step: tp 15, usually 10"


def test_bytes_of_a_port_that_are_off_are_told() -> None:
    job = Job(1)
    assert job.run(60) == []
    job.factor = 3
    found = job.run(20)
    assert kinds(found)[0] == (TRAFFIC, "n0", -1)
    assert found[0].detail.startswith("bytes a step on eth0: ")
    assert str(found[0]).startswith("traffic: node n0: ")


def test_errors_of_ports_and_logs_are_told() -> None:
    job = Job(2)
    job.run(3)
    job.errors[1], job.lines[1] = 4, ("Xid 79: GPU has fallen off the bus",)
    found = job.run(1)
    assert kinds(found) == [(PORT, "n1", -1), (LOG, "n1", -1)]
    assert found[0].detail == "eth0 has 4 new errors"
    assert "Xid 79" in found[1].detail
    job.lines.clear()
    assert job.run(3) == []


def test_a_monitor_that_starts_later_says_the_same() -> None:
    job = Job(2)
    job.run(30)
    job.watch = Watch()  # restarted: it knows nothing
    assert job.run(30) == []
    assert kinds(job.run(9, silent=[0])) == [(MISSED, "n0", rank) for rank in range(8)]


def test_a_monitor_that_could_not_run_blames_nobody_for_it() -> None:
    job = Job(2)
    job.run(10)
    job.now += 30  # of which it has heard nothing
    assert job.watch.late(job.now) == []
    assert job.run(5) == []


def test_ranks_that_go_back_some_steps_are_nothing() -> None:
    job = Job(1)
    job.run(60)
    job.steps -= 50
    assert job.run(60) == []
