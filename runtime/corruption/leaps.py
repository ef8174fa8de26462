"""Values of a run that cannot be: not finite, or far above those before."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW = 64
LEAST = 16
"""How many values must have come before one can be too high."""


def leap(name: str, values: Sequence[float], factor: float) -> str:
    """What is wrong with the last of a run's values; "" if nothing.

    It is too high by more than `factor` times the spread of those before, which is the median of
    their distances to their median, and no less than a hundredth of it.
    """
    last = values[-1]
    if not math.isfinite(last):
        return f"the {name} is {last}"
    before = [value for value in values[-1 - WINDOW : -1] if math.isfinite(value)]
    if len(before) < LEAST:
        return ""
    middle = statistics.median(before)
    spread = statistics.median(abs(value - middle) for value in before)
    limit = middle + factor * max(spread, abs(middle) / 100)
    return f"the {name} is {last:.4g}, usually {middle:.4g}" if last > limit else ""
