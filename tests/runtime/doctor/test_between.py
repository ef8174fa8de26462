"""Checks between processes name the rank at fault, which is injected."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor

from msc.runtime.doctor.between import rounds
from msc.runtime.doctor.check import Check
from msc.runtime.doctor.peers import Peers
from msc.runtime.doctor.processes import LocalRanks

NAMES = ["versions", "clocks", "pairs", "all-to-all", "all-reduce"]


class OtherTorch(Peers):
    """Rank 1 has another torch, and a clock of its own."""

    def facts(self) -> dict[str, str]:
        return super().facts() | ({"torch": "1.0"} if self.rank == 1 else {})

    def now(self) -> float:
        return super().now() + (60 if self.rank == 1 else 0)


class Flips(Peers):
    """What rank 2 sends arrives changed; it gives a wrong summand."""

    def exchange(self, peer: int, given: Tensor) -> Tensor:
        taken = super().exchange(peer, given)
        if peer == 2:
            taken[0] ^= 1
        return taken

    def all_to_all(self, value: Tensor, group: Any) -> Tensor:
        if self.rank == 2:
            value[1, 0] += 1
        return super().all_to_all(value, group)

    def all_reduce(self, value: Tensor) -> Tensor:
        if self.rank == 2:
            value[3] += 1
        return super().all_reduce(value)


class WrongSum(Peers):
    """Rank 1 alone sums wrongly."""

    def all_reduce(self, value: Tensor) -> Tensor:
        found = super().all_reduce(value)
        if self.rank == 1:
            found[0] += 1
        return found


class Silent(Peers):
    """Rank 1 does not come to the pairs."""

    def exchange(self, peer: int, given: Tensor) -> Tensor:
        if self.rank == 1:
            time.sleep(60)
        return super().exchange(peer, given)


def run(world: int, kind: type[Peers], timeout_s: float = 30.0) -> list[Check]:
    ranks = LocalRanks(world, 4096, timeout_s, "0", kind)
    ranks.start()
    return ranks.finish()


@pytest.mark.gloo
def test_sound_ranks_pass() -> None:
    found = run(3, Peers)
    assert [(check.name, check.status) for check in found] == [(name, "pass") for name in NAMES]
    assert "3 pairs" in found[2].detail


@pytest.mark.gloo
def test_another_version_and_another_clock_are_named() -> None:
    versions, clocks, *others = run(3, OtherTorch)
    assert (versions.status, versions.ranks) == ("fail", (1,))
    assert "rank 1 has torch 1.0, most have" in versions.detail
    assert (clocks.status, clocks.ranks) == ("fail", (1,))
    assert "rank 1 by -60.0" in clocks.detail or "rank 1 by -59.9" in clocks.detail
    assert [check.status for check in others] == ["pass"] * 3


@pytest.mark.gloo
def test_a_rank_that_changes_what_it_sends_is_named() -> None:
    _, _, pairs, all_to_all, all_reduce = run(3, Flips)
    assert (pairs.status, pairs.ranks) == ("fail", (2,))
    assert "from rank 2 to 0 (1 words), 2 to 1 (1 words)" in pairs.detail
    assert (all_to_all.status, all_to_all.ranks) == ("fail", (1, 2))  # one message: either side
    assert (all_reduce.status, all_reduce.ranks) == ("fail", ())  # all have the same wrong sum


@pytest.mark.gloo
def test_a_rank_that_sums_wrongly_is_named() -> None:
    *_, all_reduce = run(3, WrongSum)
    assert (all_reduce.status, all_reduce.ranks) == ("fail", (1,))


@pytest.mark.gloo
def test_a_rank_that_does_not_answer_ends_the_checks() -> None:
    found = {check.name: check for check in run(2, Silent, timeout_s=1.0)}
    assert found["pairs"].status == "fail"
    assert found["all-reduce"].status == "skipped"
    assert found["all-reduce"].detail == "'pairs' did not come to an end"
    assert found["processes"].detail == "ranks (1,) did not end in time"


@pytest.mark.parametrize("world", [2, 3, 8, 9])
def test_rounds_have_every_pair_once_and_every_rank_at_most_once(world: int) -> None:
    found = rounds(world)
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    assert len(found) == world - 1 + world % 2
    for each in found:
        ranks = [rank for pair in each for rank in pair]
        assert len(set(ranks)) == len(ranks)
