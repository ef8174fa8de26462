"""What a Trainer tells its agent, without one."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch

from msc.checkpoint.run import History
from msc.ir.mesh import Mesh
from msc.ir.torch_private import HashStore
from msc.ranks import Job
from msc.recovery import Recovery
from msc.runtime.recovery.journal import Entry, Journal
from msc.runtime.recovery.link import Generation, Link
from tests.checkpoint.runs import program

CPU = torch.device("cpu")


class Told(Link):
    """A link without an agent: what was told stays here."""

    def __init__(self) -> None:
        self.journal = Journal.new()
        self.grows = threading.Event()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def tell(self, event: str, files: Any = (), **facts: Any) -> None:
        self.events.append((event, facts))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def job(ranks: int, store: Any, rank: int = 0, may_grow: bool = False) -> Job:
    generation = Generation(1, "", 0, None, None, 0, may_grow)
    mesh = Mesh((("dp", ranks),))
    return Job(mesh, rank, CPU, store, cast(Any, None), generation)


def recovery(ranks: int, history: History | None = None) -> tuple[Recovery, Job, Told]:
    """A rank that has just got its state."""
    link = Told()
    found = Recovery(link)
    found.introduce(program(precision="float64"), saves=True)
    here = job(ranks, HashStore())
    found.began(here, history or History(), 0.0)
    return found, here, link


def restart(found: Recovery, link: Told, ranks: int) -> Job:
    here = job(ranks, HashStore())
    found.began(here, History(), 0.0)
    link.events.clear()
    return here


def test_a_program_is_introduced_with_its_sizes() -> None:
    _, _, link = recovery(4)
    assert link.events[0] == ("program", {"worlds": [[1, 1, 1]], "saves": True})


def test_repeated_steps_are_the_same_to_the_last_bit_on_as_many_ranks() -> None:
    found, here, link = recovery(4)
    found.record(here, 1, Entry(2.0, None, 0.1))
    found.record(here, 2, Entry(1.0, None, 0.1))
    here = restart(found, link, 4)
    found.record(here, 1, Entry(2.0, None, 0.1))
    assert "mismatch" not in link.names()
    found.record(here, 2, Entry(1.0 + 1e-15, None, 0.1))
    assert link.names()[-1] == "mismatch"


def test_on_other_ranks_they_are_so_within_rounding() -> None:
    found, here, link = recovery(4)
    for step in (1, 2, 3):
        found.record(here, step, Entry(2.0, None, 0.1))
    here = restart(found, link, 2)
    found.record(here, 1, Entry(2.0 + 1e-15, None, 0.1))
    found.record(here, 2, Entry(2.0 + 1e-14, None, 0.1))
    assert "mismatch" not in link.names()
    here = restart(found, link, 2)
    found.record(here, 2, Entry(2.0 + 1e-14, None, 0.1))  # all on two ranks so far
    found.record(here, 3, Entry(2.0 + 1e-14, None, 0.1))
    found.record(here, 3, Entry(2.0 + 2e-14, None, 0.1))  # what came before was not the same
    assert "mismatch" not in link.names()
    found.record(here, 3, Entry(2.001, None, 0.1))
    assert link.names()[-1] == "mismatch"


def test_what_a_checkpoint_tells_of_steps_is_of_an_unknown_number_of_ranks() -> None:
    found, here, link = recovery(2, History([2.0], [], [0.1]))
    here = restart(found, link, 2)
    found.record(here, 1, Entry(2.0 + 1e-15, None, 0.1))
    assert "mismatch" not in link.names()


def test_after_going_back_nothing_must_be_as_it_was() -> None:
    found, here, link = recovery(2)
    for step in (1, 2):
        found.record(here, step, Entry(2.0, None, 0.1))
    found.went_back(here, 1)
    found.record(here, 2, Entry(3.0, None, 0.1))
    assert "mismatch" not in link.names()


def test_all_ranks_give_way_after_the_same_step() -> None:
    store = HashStore()
    ranks = [(Recovery(Told()), job(2, store, rank, may_grow=True)) for rank in (0, 1)]
    for found, here in ranks:
        found.began(here, History(), 0.0)
    (first, _), (second, _) = ranks
    assert not any(found.gives_way(here, 1) for found, here in ranks)
    second.link.grows.set()  # rank 1 hears of it first
    assert not any(found.gives_way(here, 2) for found, here in reversed(ranks))
    first.link.grows.set()
    assert not any(found.gives_way(here, 3) for found, here in reversed(ranks))
    assert all(found.gives_way(here, 4) for found, here in reversed(ranks))
    for found, here in ranks:
        found.give_way(here, 4, complete=False)  # storage was full
    assert cast(Told, first.link).names()[-1] == "goes on"
    assert "goes on" not in cast(Told, second.link).names()
    assert not first.gives_way(ranks[0][1], 5)
    first.link.grows.set()
    assert not first.gives_way(ranks[0][1], 6)
    assert all(found.gives_way(here, 7) for found, here in ranks)


def test_a_run_that_lacks_no_rank_asks_nobody() -> None:
    found = Recovery(Told())
    found.link.grows.set()
    assert not found.gives_way(job(2, None), 1)


def test_who_gives_way_waits_to_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Told()
    ended: list[Any] = []

    def surrender(event: str, **facts: Any) -> Any:
        ended.append((event, facts))
        raise SystemExit

    monkeypatch.setattr(link, "surrender", surrender)
    with pytest.raises(SystemExit):
        Recovery(link).give_way(job(2, None), 5, complete=True)
    assert ended == [("gave way", {"step": 5})]
