"""Scripted hangs on eight ranks, each at every rank: the first cause is named, not its victims."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import msc
from msc.ir.mesh import Mesh
from msc.runtime.diagnosis import blame as words
from msc.runtime.diagnosis.blame import Verdict, blame, describe
from msc.runtime.diagnosis.grid import draw, grid_text
from msc.runtime.diagnosis.ring import RankView, Record
from msc.runtime.diagnosis.schedule import WAIT, Act, members_of, schedule_of
from tests import models

MESH = Mesh.parse("pp=2,dp=2,tp=2")
WORLD = MESH.size


@functools.cache
def schedules() -> dict[int, list[Act]]:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=2)
    program = msc.compile(
        model, models.tokens(), mesh=MESH, microbatches=2, optimizer=msc.AdamW(max_norm=1.0)
    )
    return {rank: schedule_of(program.rank_graph(rank), MESH, rank) for rank in range(WORLD)}


@dataclass
class Fake:
    """A rank that goes through its acts; `stop` is where it does not go on, and `alive` why."""

    rank: int
    acts: list[Act]
    stop: int = -1
    alive: str = "running"
    phase: str = "step"
    dies_waiting: bool = False
    at: int = 0
    waiting: bool = False
    started: dict[str, int] = field(default_factory=dict)
    forms: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    sequences: list[int] = field(default_factory=list)

    def step(self, others: Mapping[int, Fake]) -> bool:
        """Do one act; whether there was one to do."""
        if self.at == len(self.acts):
            return False
        act = self.acts[self.at]
        if self.waiting:
            if self.at == self.stop or not self._met(act, others):
                return False
            self.waiting = False
            self.at += 1
            return True
        if self.at == self.stop and not self.dies_waiting:
            return False
        if act.kind == WAIT:
            self.sequences.append(self.sequences[act.started])
            self.waiting = True
            return True
        sequence = self.started.get(act.channel, 0)
        self.started[act.channel] = sequence + 1
        self.forms[act.channel, sequence] = act.kind, act.nbytes
        self.sequences.append(sequence)
        self.at += 1
        return True

    def _met(self, act: Act, others: Mapping[int, Fake]) -> bool:
        key = act.channel, self.sequences[act.started]
        kind, size = self.forms[key]
        for member in members_of(act.channel):
            form = others[member].forms.get(key)
            if form is None or form[1] != size:
                return False
            if others[member].alive != "running" and others[member].dies_waiting:
                return False
            if form[0] != kind and {form[0], kind} != {"send", "recv"}:
                return False
        return True

    def view(self) -> RankView:
        done = len(self.sequences)
        records = tuple(
            Record(
                act.kind,
                act.channel,
                self.sequences[place],
                act.nbytes,
                1,
                0 if self.waiting and place == done - 1 else 1,
            )
            for place, act in enumerate(self.acts[:done])
        )
        return RankView(self.rank, 0, self.alive, self.phase, 7, done, dict(self.started), records)


def run(ranks: dict[int, Fake]) -> dict[int, Fake]:
    while any([rank.step(ranks) for rank in ranks.values()]):
        pass
    return ranks


def starts(acts: Sequence[Act], kinds: Sequence[str] = ()) -> list[int]:
    return [
        i for i, act in enumerate(acts) if act.kind != WAIT and (not kinds or act.kind in kinds)
    ]


def without(acts: list[Act], place: int) -> list[Act]:
    """Acts that lack a start and its wait."""
    gone = {place} | {i for i, act in enumerate(acts) if act.started == place}
    new = {old: i for i, old in enumerate(i for i in range(len(acts)) if i not in gone)}
    return [
        replace(act, started=new.get(act.started, -1))
        for i, act in enumerate(acts)
        if i not in gone
    ]


COLLECTIVE = ("all_gather", "reduce_scatter", "all_reduce")


def stopped(fake: Fake, chance: random.Random, **changes: object) -> Fake:
    place = chance.randrange(len(fake.acts))
    if changes.get("dies_waiting"):
        place = chance.choice([i for i, act in enumerate(fake.acts) if act.kind == WAIT])
    return replace(fake, stop=place, **changes)  # type: ignore[arg-type]


def changed(fake: Fake, chance: random.Random, how: str) -> Fake:
    acts = list(fake.acts)
    place = chance.choice(starts(acts, COLLECTIVE))
    if how == "skipped":
        return replace(fake, acts=without(acts, place))
    if how == "no send":
        sends = starts(acts, ("send",))
        return replace(fake, acts=without(acts, chance.choice(sends)))
    if how == "size":
        acts[place] = replace(acts[place], nbytes=acts[place].nbytes + 4)
    if how == "kind":
        other = "all_reduce" if acts[place].kind != "all_reduce" else "all_gather"
        acts[place] = replace(acts[place], kind=other)
    if how == "order":
        # the later start comes before the earlier one, and both with the other's channel
        pairs = [
            (a, b)
            for a in starts(acts, COLLECTIVE)
            for b in starts(acts, COLLECTIVE)
            if a < b and acts[a].channel == acts[b].channel and acts[a].nbytes != acts[b].nbytes
        ]
        a, b = chance.choice(pairs)
        acts[a], acts[b] = acts[b], acts[a]
    return replace(fake, acts=acts)


HANGS: dict[str, tuple[str, Callable[[Fake, random.Random], Fake]]] = {
    "frozen": (words.FROZEN, lambda f, c: stopped(f, c, alive="stopped")),
    "frozen while it waits": (
        words.FROZEN,
        lambda f, c: stopped(f, c, alive="stopped", dies_waiting=True),
    ),
    "killed": (words.DEAD, lambda f, c: stopped(f, c, alive="dead")),
    "killed while it waits": (
        words.DEAD,
        lambda f, c: stopped(f, c, alive="dead", dies_waiting=True),
    ),
    "no data": (words.DATA, lambda f, c: replace(f, stop=0, phase="data")),
    "killed without data": (
        words.DEAD,
        lambda f, c: replace(f, stop=0, phase="data", alive="dead"),
    ),
    "a checkpoint": (words.SAVING, lambda f, c: replace(f, stop=0, phase="save")),
    "live-lock": (words.BUSY, lambda f, c: stopped(f, c)),
    "an exception": (words.FAILED, lambda f, c: stopped(f, c, phase="failed", alive="dead")),
    "an early end": (words.ENDED, lambda f, c: stopped(f, c, phase="ended", alive="dead")),
    "a skipped collective": (words.MISMATCH, lambda f, c: changed(f, c, "skipped")),
    "another size": (words.MISMATCH, lambda f, c: changed(f, c, "size")),
    "another collective": (words.MISMATCH, lambda f, c: changed(f, c, "kind")),
    "another order": (words.MISMATCH, lambda f, c: changed(f, c, "order")),
    "a receive without a send": (words.MISMATCH, lambda f, c: changed(f, c, "no send")),
}


def hang(name: str, rank: int) -> tuple[dict[int, RankView], str]:
    """The views of all ranks when nothing goes on any more, and what is wrong with `rank`."""
    what, make = HANGS[name]
    for seed in range(200):
        chance = random.Random(f"{name} {rank} {seed}")
        ranks = {r: Fake(r, list(schedules()[r])) for r in range(WORLD)}
        ranks[rank] = make(ranks[rank], chance)
        run(ranks)
        if any(each.waiting for r, each in ranks.items() if r != rank):
            return {r: each.view() for r, each in ranks.items()}, what
    raise AssertionError("this fault holds nobody up")


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("name", HANGS)
def test_the_first_cause_is_named(name: str, rank: int) -> None:
    views, what = hang(name, rank)
    verdict = blame(views, schedules(), WORLD)
    assert [(cause.rank, cause.what) for cause in verdict.causes] == [(rank, what)], describe(
        verdict, views, schedules(), MESH
    )


def test_a_run_without_a_hang_blames_nobody() -> None:
    ranks = run({r: Fake(r, list(schedules()[r])) for r in range(WORLD)})
    assert all(each.at == len(each.acts) for each in ranks.values())
    views = {r: each.view() for r, each in ranks.items()}
    verdict = blame(views, schedules(), WORLD)
    assert verdict == Verdict((), {})
    assert describe(verdict, views, schedules(), MESH) == "No rank waits for another."


def test_a_rank_that_never_began() -> None:
    ranks = {r: Fake(r, list(schedules()[r])) for r in range(WORLD)}
    ranks[3].stop = 0
    views = {r: each.view() for r, each in run(ranks).items() if r != 3}
    (cause,) = blame(views, schedules(), WORLD).causes
    assert (cause.rank, cause.what, cause.detail) == (3, words.DEAD, "it has never begun")


def test_victims_that_have_given_up_are_no_causes() -> None:
    views, _ = hang("frozen", 5)
    gave_up = {
        rank: view if rank == 5 else replace(view, alive="dead", phase="lost")
        for rank, view in views.items()
    }
    (cause,) = blame(gave_up, schedules(), WORLD).causes
    assert (cause.rank, cause.what) == (5, words.FROZEN)


def test_two_faults_are_both_named() -> None:
    ranks = {r: Fake(r, list(schedules()[r])) for r in range(WORLD)}
    ranks[0] = replace(ranks[0], stop=2, alive="stopped")
    ranks[7] = replace(ranks[7], stop=2, alive="dead")
    views = {r: each.view() for r, each in run(ranks).items()}
    found = [(cause.rank, cause.what) for cause in blame(views, schedules(), WORLD).causes]
    assert found == [(0, words.FROZEN), (7, words.DEAD)]


def test_ranks_that_wait_in_a_ring() -> None:
    view = RankView(0, 0, "running", "step", 1, 2, {}, ())
    wait = Record(WAIT, "b:1>0", 0, 0, 1, 0)
    views = {
        0: replace(view, records=(wait,), started={"b:1>0": 1}),
        1: replace(view, rank=1, records=(replace(wait, channel="b:0>1"),), started={"b:0>1": 1}),
    }
    causes = blame(views, {}, 2).causes
    assert [(cause.rank, cause.what) for cause in causes] == [(0, words.RING), (1, words.RING)]


def test_words_and_pictures(tmp_path: Path) -> None:
    views, _ = hang("killed", 2)
    verdict = blame(views, schedules(), WORLD)
    text = describe(verdict, views, schedules(), MESH)
    assert text.startswith("rank 2 (pp=0,dp=1,tp=0) is dead (step 7)\n  next in its program: ")
    assert "waits for it: " in text
    assert "No rank is there any more" not in text
    gone = {rank: replace(view, alive="dead") for rank, view in views.items()}
    last = describe(blame(gone, schedules(), WORLD), gone, schedules(), MESH).splitlines()[-1]
    assert last == "No rank is there any more: all were stopped, or ended after the first cause."
    waiting = {rank for rank in verdict.waits}
    assert set(verdict.victims(2)) <= waiting
    grid = grid_text(verdict, MESH).splitlines()
    assert grid[2].startswith("pp=0 dp=1   X ")
    assert len(grid) == 5
    pytest.importorskip("matplotlib")
    draw(verdict, views, MESH, tmp_path / "blame.png")
    assert (tmp_path / "blame.png").stat().st_size > 1000
