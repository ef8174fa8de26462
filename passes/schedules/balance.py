"""Chunks whose stages have even work, where a stage has several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msc.passes.schedules.stages import Stages

_LEAST = 1e-9  # of the whole work: less is rounding


def even_stages(
    costs: Sequence[float], runs: Sequence[Sequence[int]], stages: Stages
) -> list[list[int]]:
    """Move the borders of runs while that makes the busiest stage less busy, or the chunks evener.

    costs: of each item; runs: of each chunk, its items in order. A move shifts a series of borders
    by one item, so that one chunk of a stage gives it to another one's. With one chunk per stage
    runs of least largest cost, as `balance` gives, stay as they are.
    """
    total = [0.0, *itertools.accumulate(costs)]
    borders = [0, *itertools.accumulate(len(run) for run in runs)]
    members = [stages.chunks(stage) for stage in range(stages.count)]
    best = _loads(total, borders, members)
    moves = [
        (first, last, by)
        for first in range(1, len(runs))
        for last in range(first, len(runs))
        for by in (-1, 1)
    ]
    improved = stages.virtual > 1
    while improved:
        improved = False
        for first, last, by in moves:
            moved = [b + by if first <= i <= last else b for i, b in enumerate(borders)]
            if any(start >= end for start, end in itertools.pairwise(moved)):
                continue
            loads = _loads(total, moved, members)
            if loads < best:
                borders, best, improved = moved, loads, True
    return [list(range(start, end)) for start, end in itertools.pairwise(borders)]


def _loads(
    total: Sequence[float], borders: Sequence[int], members: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The busiest stage's work, then how uneven chunks are; in units in which rounding is lost."""
    unit = _LEAST * total[-1] or 1.0
    chunks = [(total[end] - total[start]) / unit for start, end in itertools.pairwise(borders)]
    busiest = max(sum(chunks[c] for c in own) for own in members)
    return round(busiest), round(_LEAST * sum(chunk**2 for chunk in chunks))
