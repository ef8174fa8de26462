"""Axes that shard values, and what several of them together leave of a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msc.ir.placement import Shard, State

States = tuple[State, ...]
"""One state per axis, in the order of the axes."""


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or the micro-batch axis, that shards."""

    name: str
    size: int


def parts(axes: Sequence[Axis]) -> int:
    """Number of parts that the axes make together."""
    return math.prod(axis.size for axis in axes)


def local_runs(
    length: int, axis: int, states: States, axes: Sequence[Axis], dim: int
) -> list[int] | None:
    """Local lengths of the runs of `dim` that `axes[axis]` shards, after the axes before it.

    None where an earlier axis splits the dim finer than this one, so that the runs are not
    contiguous, or where what the earlier axes left does not split evenly.
    """
    placement = states[axis].value
    assert isinstance(placement, Shard)
    runs = list(placement.run_lengths(length))
    for outer in range(axis):
        other = states[outer].value
        if not isinstance(other, Shard) or other.dim != dim:
            continue
        if not isinstance(other.segments, int) or not isinstance(placement.segments, int):
            return None
        if len(runs) % (other.segments * axes[outer].size):
            if other.segments != placement.segments:
                return None
            if any(run % axes[outer].size for run in runs):
                return None
            runs = [run // axes[outer].size for run in runs]
            continue
        runs = runs[: len(runs) // axes[outer].size]
    if any(run % axes[axis].size for run in runs):
        return None
    return [run // axes[axis].size for run in runs]


def local_shape(shape: Sequence[int], states: States, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The shape of a rank's part of a value of global `shape`."""
    local = list(shape)
    for state, axis in zip(states, axes, strict=True):
        if isinstance(state.value, Shard):
            local[state.value.dim] //= axis.size
    return tuple(local)


def with_state(states: States, index: int, state: State) -> States:
    """`states` with that of one axis replaced."""
    return (*states[:index], state, *states[index + 1 :])
