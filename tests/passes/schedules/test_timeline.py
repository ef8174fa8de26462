"""Times of given orders, at equal and unequal costs."""

from __future__ import annotations

import pytest

from msc.ir.errors import PlanError
from msc.passes.schedules.stages import Stages, Step
from msc.passes.schedules.timeline import (
    Costs,
    bubble_fraction,
    makespan,
    needs,
    peak_held,
    start_times,
)


def steps(text: str) -> list[Step]:
    """`F0@1 B0@1`: kind, micro-batch and chunk."""
    kinds = {"F": "forward", "B": "backward", "W": "weight"}
    found = []
    for word in text.split():
        number, chunk = word[1:].split("@")
        found.append(Step(kinds[word[0]], int(number), int(chunk)))  # type: ignore[arg-type]
    return found


ORDERS = [steps("F0@0 F1@0 B0@0 B1@0"), steps("F0@1 B0@1 F1@1 B1@1")]


def test_steps_wait_for_what_they_need() -> None:
    costs = Costs((1.0, 2.0), (3.0, 4.0), (0.0, 0.0), transfer=0.5)
    found = {str(step): start for step, start in start_times(ORDERS, Stages(2), costs).items()}
    assert found == {
        "F0@0": 0.0,
        "F1@0": 1.0,
        "F0@1": 1.5,
        "B0@1": 3.5,
        "F1@1": 7.5,
        "B0@0": 8.0,
        "B1@1": 9.5,
        "B1@0": 14.0,
    }
    assert makespan(ORDERS, Stages(2), costs) == 17.0
    assert bubble_fraction(ORDERS, Stages(2), costs) == pytest.approx(17 / 12 - 1)


def test_a_value_that_stays_on_its_stage_takes_no_time() -> None:
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), transfer=100.0)
    order = steps("F0@0 F0@1 B0@1 B0@0 W0@1 W0@0")
    assert makespan([order], Stages(1, 2), costs) == 6.0


def test_needs() -> None:
    assert [str(s) for s in needs(Step("forward", 3, 2), 4)] == ["F3@1"]
    assert [str(s) for s in needs(Step("backward", 3, 2), 4)] == ["F3@2", "B3@3"]
    assert [str(s) for s in needs(Step("backward", 3, 3), 4)] == ["F3@3"]
    assert [str(s) for s in needs(Step("weight", 3, 3), 4)] == ["B3@3"]
    assert needs(Step("forward", 3, 0), 4) == []


def test_activations_are_held_until_their_last_reader() -> None:
    assert peak_held(steps("F0@0 F1@0 B0@0 F2@0 B1@0 B2@0")) == 2
    assert peak_held(steps("F0@0 F1@0 B0@0 F2@0 W0@0 B1@0 W1@0 B2@0 W2@0")) == 3
    assert peak_held([]) == 0


def test_a_ring_of_orders() -> None:
    wrong = [steps("F0@0 B0@0 F1@0 B1@0"), steps("F0@1 F1@1 B0@1 B1@1")]
    with pytest.raises(PlanError) as error:
        start_times(wrong, Stages(2), Costs.equal(2, False))
    assert str(error.value) == (
        "The schedule's orders wait for each other: stage 0 at B0@0, stage 1 at F1@1."
    )
