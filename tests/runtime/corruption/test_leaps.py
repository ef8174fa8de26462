"""Values that cannot be right."""

from __future__ import annotations

import math
import random

import pytest

from msc.runtime.corruption.leaps import LEAST, leap


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told_from_the_first_step(value: float) -> None:
    assert leap("loss", [value], 20.0) == f"the loss is {value}"


def test_a_training_curve_has_no_leaps_and_one_far_above_it_is_one() -> None:
    noise = random.Random(0)
    curve = [4 * math.exp(-step / 200) + 2 + noise.gauss(0, 0.05) for step in range(500)]
    for end in range(1, len(curve) + 1):
        assert leap("loss", curve[:end], 20.0) == ""
    text = leap("loss", [*curve, 9.0], 20.0)
    assert text.startswith("the loss is 9, usually 2.")
    assert leap("loss", [*curve, 0.1], 20.0) == ""  # downwards is no harm


def test_few_values_or_equal_ones_say_little() -> None:
    assert leap("loss", [1.0] * (LEAST - 1) + [100.0], 20.0) == ""
    assert leap("loss", [1.0] * LEAST + [1.1], 20.0) == ""
    assert leap("loss", [1.0] * LEAST + [1.3], 20.0) == "the loss is 1.3, usually 1"
    assert leap("loss", [1.0] * LEAST + [math.nan, 1.1], 20.0) == ""
