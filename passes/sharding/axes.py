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
    """A mesh axis, or the micro-batch axis, that shards.

    part: the coordinate whose shapes are meant, where parts differ in length.
    """

    name: str
    size: int
    part: int = 0


def parts(axes: Sequence[Axis]) -> int:
    """Number of parts that the axes make together."""
    return math.prod(axis.size for axis in axes)


def local_runs(
    length: int, axis: int, states: States, axes: Sequence[Axis], dim: int
) -> list[int] | None:
    """Local lengths of the runs of `dim` that `axes[axis]` shards, after the axes before it.

    None where an earlier axis splits the dim finer than this one, so that the runs are not
    contiguous, or where what the earlier axes left does not split so.
    """
    runs = runs_left(length, axis, states, axes, dim)
    placement = states[axis].value
    assert isinstance(placement, Shard)
    whole = placement.unit or axes[axis].size
    if runs is None or any(run % whole for run in runs):
        return None
    return [placement.part(run, axes[axis].size, axes[axis].part) for run in runs]


def runs_left(
    length: int, axis: int, states: States, axes: Sequence[Axis], dim: int
) -> list[int] | None:
    """The runs that `axes[axis]` splits: what the axes before it left of them."""
    placement = states[axis].value
    assert isinstance(placement, Shard)
    runs = list(placement.run_lengths(length))
    for outer in range(axis):
        other = states[outer].value
        if not isinstance(other, Shard) or other.dim != dim:
            continue
        if not isinstance(other.segments, int) or not isinstance(placement.segments, int):
            return None
        if other.unit or placement.unit:
            return None  # unequal parts are split no further
        if len(runs) % (other.segments * axes[outer].size):
            if other.segments != placement.segments:
                return None
            if any(run % axes[outer].size for run in runs):
                return None
            runs = [run // axes[outer].size for run in runs]
            continue
        runs = runs[: len(runs) // axes[outer].size]
    return runs


def local_shape(shape: Sequence[int], states: States, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The shape of the part of a value of global `shape` that the axes' coordinates have."""
    local = list(shape)
    for state, axis in zip(states, axes, strict=True):
        if isinstance(state.value, Shard):
            dim = state.value.dim
            runs = state.value.run_lengths(local[dim]) if state.value.unit else (local[dim],)
            local[dim] = sum(state.value.part(run, axis.size, axis.part) for run in runs)
    return tuple(local)


def with_state(states: States, index: int, state: State) -> States:
    """`states` with that of one axis replaced."""
    return (*states[:index], state, *states[index + 1 :])
