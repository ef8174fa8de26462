"""Learning-rate schedules, counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import msc
from msc.ir.optimizer import LearningRate


def rates(schedule: LearningRate, steps: int) -> list[float]:
    return [float(schedule.at(torch.tensor(step))) for step in range(1, steps + 1)]


def test_warm_up_goes_straight_up_and_stays() -> None:
    found = rates(LearningRate.constant(0.4, warmup=4), 6)
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rel=1e-15)
    assert rates(LearningRate.constant(0.4), 2) == [0.4, 0.4]


def test_linear_decay_ends_in_the_last_step() -> None:
    found = rates(LearningRate.linear(1.0, steps=6, warmup=2, final=0.2), 8)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], rel=1e-15)


def test_cosine_decay() -> None:
    found = rates(LearningRate.cosine(1.0, steps=4), 5)
    half = math.sqrt(0.5) / 2
    assert found == pytest.approx([0.5 + half, 0.5, 0.5 - half, 0.0, 0.0], abs=1e-15)


def test_stable_between_warm_up_and_decay() -> None:
    found = rates(LearningRate.wsd(1.0, steps=7, warmup=2, decay=2), 8)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0], abs=1e-15)
    nothing_stable = LearningRate.wsd(1.0, steps=4, warmup=2, decay=2, shape="cosine")
    assert rates(nothing_stable, 4) == pytest.approx([0.5, 1.0, 0.5, 0.0], abs=1e-15)


def test_a_rate_is_a_float64_of_no_dims() -> None:
    value = LearningRate.cosine(1.0, steps=4, warmup=1).at(torch.tensor(2))
    assert (value.dtype, value.shape) == (torch.float64, ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearningRate.constant(-1.0), r"lr is -1\.0; it is a finite number of at least 0"),
        (lambda: LearningRate.constant(1.0, warmup=-1), "warmup is -1; it is a whole number of at"),
        (lambda: LearningRate.cosine(1.0, steps=0), "steps is 0; it is a whole number of at lea"),
        (lambda: LearningRate.cosine(1.0, steps=3, warmup=3), "steps=3 leaves nothing after the"),
        (lambda: LearningRate.linear(1.0, steps=3, final=math.inf), "final is inf"),
        (lambda: LearningRate.wsd(1.0, steps=3, decay=2, warmup=2), "warmup=2 and decay=2 are mo"),
        (lambda: LearningRate.wsd(1.0, steps=3, decay=1, shape="root"), "shape 'root'; the shapes"),
        (lambda: LearningRate(((0, 0.0, 1.0),), 1.0), "a phase has 0 steps"),  # type: ignore[arg-type]
    ],
)
def test_schedules_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(msc.PlanError, match=f"LearningRate: .*{message}"):
        make()
