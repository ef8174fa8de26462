"""Schedules: the order on each stage, what it holds at once, and the names that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.errors import PlanError
from msc.passes.schedules import SCHEDULES, Step, gpipe, one_forward_one_backward, schedule_of

STAGES = st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


def order(steps: list[Step]) -> str:
    return " ".join(map(str, steps))


def test_gpipe_runs_all_forwards_first() -> None:
    for stage in range(3):
        assert order(gpipe(stage, 3, 4)) == "F0 F1 F2 F3 B0 B1 B2 B3"


def test_1f1b_alternates_after_a_warm_up() -> None:
    assert [order(one_forward_one_backward(stage, 4, 5)) for stage in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    assert order(one_forward_one_backward(0, 4, 2)) == "F0 F1 B0 B1"
    assert order(one_forward_one_backward(0, 4, 1)) == "F0 B0"


@given(st.sampled_from(sorted(SCHEDULES)), STAGES, st.integers(1, 12))
def test_every_micro_batch_runs_once_each_way(
    name: str, place: tuple[int, int], count: int
) -> None:
    stage, num_stages = place
    steps = schedule_of(name)(stage, num_stages, count)
    for kind in ("forward", "backward"):
        assert [s.micro_batch for s in steps if s.kind == kind] == list(range(count))
    assert {step.chunk for step in steps} == {stage}
    positions = {(step.kind, step.micro_batch): i for i, step in enumerate(steps)}
    assert all(positions["forward", i] < positions["backward", i] for i in range(count))


@given(STAGES, st.integers(1, 12))
def test_1f1b_holds_no_more_activations_than_stages_follow(
    place: tuple[int, int], count: int
) -> None:
    stage, num_stages = place
    held = most = 0
    for step in one_forward_one_backward(stage, num_stages, count):
        held += 1 if step.kind == "forward" else -1
        most = max(most, held)
    assert held == 0
    assert most == min(num_stages - stage, count)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        schedule_of("zigzag")
    assert str(error.value) == "Schedule 'zigzag' is unknown. The schedules are gpipe, 1f1b."
