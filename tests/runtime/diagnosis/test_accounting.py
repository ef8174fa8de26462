"""Accounts of a run: what lies between the attempts of a rank, and over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from msc.runtime.diagnosis.accounting import accounts, mean, worst
from msc.runtime.diagnosis.ledger import CLASSES, Attempt


def attempt(began: float, last: str = "compute", **seconds: float) -> Attempt:
    spent = dict.fromkeys(CLASSES, 0.0) | seconds
    return Attempt(began, spent, last, 3, 0.0, False, "dead", "host")


def test_time_between_attempts_is_detection_then_repair() -> None:
    killed = [attempt(100, init=5, compute=15), attempt(150, init=5, compute=45)]
    survivor = [
        replace(attempt(100, "repair", compute=10, detect=15, repair=1), noticed_s=125.0),
        attempt(150, init=5, compute=45),
    ]
    first, second = accounts({0: killed, 1: survivor})
    assert first.seconds["detect"] == 5  # from 120, when it died, until rank 1 knew of it
    assert first.seconds["repair"] == 25
    assert second.seconds["detect"] == 15
    assert second.seconds["repair"] == 1 + 24
    assert first.wall_s == second.wall_s == 100
    assert sum(first.seconds.values()) == first.wall_s
    assert (first.attempts, first.last_step, first.effective) == (2, 3, 0.6)
    assert worst([first, second]).rank == 1
    assert mean([first, second])["compute"] == 57.5


def test_a_failure_that_nobody_has_noted_is_detected_by_the_next_attempt() -> None:
    (found,) = accounts({0: [attempt(0, compute=10), attempt(30, compute=10)]})
    assert (found.seconds["detect"], found.seconds["repair"], found.wall_s) == (20, 0, 40)


def test_no_class_has_less_than_nothing_where_an_attempt_begins_before_the_end() -> None:
    (found,) = accounts({0: [attempt(0, compute=10), attempt(9.9, compute=10)]})
    assert (found.seconds["detect"], found.seconds["repair"], found.wall_s) == (0, 0, 20)


def test_time_after_an_attempt_that_ended_is_idle() -> None:
    ended = replace(attempt(0, "idle", compute=10), ended=True)
    (found,) = accounts({0: [ended, attempt(30, compute=10)]})
    assert (found.seconds["idle"], found.seconds["detect"]) == (20, 0)


def test_a_rank_that_is_gone_has_lost_the_time_until_the_others_end() -> None:
    noticed = replace(attempt(0, "repair", compute=10, repair=30), noticed_s=12.0)
    gone, other, ended = accounts(
        {
            0: [attempt(0, compute=10)],
            1: [noticed],
            2: [replace(attempt(0, compute=20), ended=True)],
            3: [],
        }
    )
    assert (gone.seconds["detect"], gone.seconds["repair"], gone.wall_s) == (2, 28, 40)
    assert other.wall_s == 40
    assert ended.wall_s == 20


def test_a_rank_that_the_others_go_on_without_is_under_repair() -> None:
    stays = [attempt(0, compute=10), attempt(14, compute=50), attempt(65, compute=35)]
    leaves = [attempt(0, compute=10), attempt(64, compute=36)]
    first, second = accounts({0: stays, 1: leaves})
    assert (first.seconds["detect"], first.seconds["repair"]) == (4, 1)
    assert (second.seconds["detect"], second.seconds["repair"]) == (4, 50)
    assert first.wall_s == second.wall_s == 100


@pytest.mark.parametrize("ledgers", [{}, {0: []}])
def test_no_attempts_no_accounts(ledgers: dict[int, list[Attempt]]) -> None:
    assert accounts(ledgers) == []
