"""The tables between a value and its readers: each conversion is paid once for all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from msc.ir.placement import State
from msc.passes.sharding.network import CostNetwork

LARGEST = 4096
"""Entries of a table over a value and all its readers, above which each conversion is a choice."""


@dataclass(frozen=True)
class Read:
    """A variable, and the state that each of its options has, or wants, a value in."""

    variable: int
    states: Sequence[State]


def add_reads(
    network: CostNetwork,
    made: Read,
    reads: Sequence[Read],
    conversion: Callable[[State, State], float],
    largest: int = LARGEST,
) -> None:
    """Add what it costs to bring a value from the state it is made in to where it is read.

    `conversion(have, want)` is infinite where there is none. A reader may stand for several
    operands of one call.
    """
    have = list(dict.fromkeys(made.states))
    want = list(dict.fromkeys(state for read in reads for state in read.states))
    by_state = np.asarray([[conversion(h, w) for w in want] for h in have])
    costs = by_state[[have.index(state) for state in made.states]]
    wanted = [(read.variable, _one_hot(read, want)) for read in reads]
    sizes = {variable: len(matrix) for variable, matrix in wanted}
    if len(costs) * math.prod(sizes.values()) <= largest:
        _joint_table(network, made.variable, costs, wanted)
    else:
        _choices(network, made.variable, costs, wanted)


_Scalar = TypeVar("_Scalar", bound=np.generic)
Matrix = NDArray[np.float64]
Wanted = Sequence[tuple[int, NDArray[np.bool_]]]
"""Variables, and a matrix `[option, state]` of what they want."""


def _one_hot(read: Read, want: Sequence[State]) -> NDArray[np.bool_]:
    return np.asarray([[state == w for w in want] for state in read.states])


def _joint_table(network: CostNetwork, made: int, costs: Matrix, wanted: Wanted) -> None:
    """One table over the value and its readers."""
    scope = list(dict.fromkeys([made, *(variable for variable, _ in wanted)]))
    used = np.zeros([*(network.sizes[v] for v in scope), costs.shape[1]], dtype=np.bool_)
    for variable, matrix in wanted:
        used |= _along(matrix, scope.index(variable), len(scope))
    network.table(scope, np.where(used, _along(costs, 0, len(scope)), 0.0).sum(axis=-1))


def _choices(network: CostNetwork, made: int, costs: Matrix, wanted: Wanted) -> None:
    """A variable for each state that several readers may want: whether the value is there in it."""
    readers = Counter(int(column) for _, m in wanted for column in np.flatnonzero(m.any(axis=0)))
    shared = [column for column, count in readers.items() if count > 1]
    for variable, matrix in wanted:
        own = matrix.copy()
        own[:, shared] = False
        _joint_table(network, made, costs, [(variable, own)])
    for column in shared:
        there = network.variable([0.0, 0.0])
        price = costs[:, column]
        network.table([made, there], np.stack([np.zeros_like(price), price], axis=1))
        for variable, matrix in wanted:
            missing = np.where(matrix[:, column], np.inf, 0.0)
            network.table([variable, there], np.stack([missing, np.zeros_like(missing)], axis=1))


def _along(matrix: NDArray[_Scalar], axis: int, count: int) -> NDArray[_Scalar]:
    """`[option, state]` with the options along `axis` of `count`, and the states last."""
    shape = [1] * count + [matrix.shape[1]]
    shape[axis] = matrix.shape[0]
    return matrix.reshape(shape)
