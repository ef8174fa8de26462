"""Cost networks: choices with costs, and tables of costs over a few of them; the exact minimum.

    %a: 3 options    %b: 2 options    %c: 4 options        table(a, b)   table(b, c)

A variable is eliminated by adding up the tables that mention it and keeping, for every combination
of its neighbours, its best option: a new table over the neighbours (nonserial dynamic programming;
Dechter, "Bucket elimination", 1999). The cheapest variable goes first. A model's graph is long and
narrow, so that no table grows large and the time is linear in the number of variables. What is left
where a table would grow too large, or where an amount is bounded, goes to an integer program.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msc.passes.sharding.core_program import Table, solve_core

LARGEST = 2**22
"""Entries of the largest table that elimination makes before it keeps a step's best options."""
_CORE_LARGEST = 2**10
"""The same where an integer program follows, whose variables are the entries of its tables."""
_TIE = 1e-12

Numbers = NDArray[np.float64]


class NoSolutionError(Exception):
    """No combination of options has a finite cost, or none keeps to the bound.

    least: the smallest amount that there is; infinite where no combination has a finite cost.
    """

    def __init__(self, least: float = math.inf) -> None:
        super().__init__(least)
        self.least = least


@dataclass(frozen=True)
class Solution:
    """The option of every variable, and their cost."""

    options: list[int]
    cost: float


class CostNetwork:
    """Variables and tables under construction. Costs may be infinite, and are never negative."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._tables: list[Table] = []
        self._amounts: dict[int, Numbers] = {}

    def variable(self, costs: Sequence[float]) -> int:
        """A choice among `len(costs)` options; its index."""
        self.sizes.append(len(costs))
        index = len(self.sizes) - 1
        self.table((index,), np.asarray(costs, dtype=np.float64))
        return index

    def table(self, scope: Sequence[int], costs: Numbers) -> None:
        """What each combination of the variables in `scope` costs; an axis for each of them."""
        assert costs.shape == tuple(self.sizes[v] for v in scope), (scope, costs.shape)
        self._tables.append(Table(tuple(scope), costs))

    def amount(self, variable: int, amounts: Sequence[float]) -> None:
        """What each option takes of the amount that `solve` bounds; otherwise nothing."""
        self._amounts[variable] = np.asarray(amounts, dtype=np.float64)

    def solve(self, bound: float = math.inf, largest: int = LARGEST) -> Solution:
        """The cheapest combination whose amounts add up to at most `bound`.

        Of options that cost the same, the first is taken.

        Raises:
            NoSolutionError: there is none.
        """
        found = self._minimum(self._tables, largest)
        if self.total_amount(found.options) <= bound:
            return found
        least = self.least_amount(largest)
        if least > bound:
            raise NoSolutionError(least)
        elimination = _Elimination(self.sizes, self._tables, set(self._amounts))
        elimination.run(_CORE_LARGEST)
        return self._finish(elimination, bound)

    def total_amount(self, options: Sequence[int]) -> float:
        """What a combination takes in total."""
        return float(sum(amounts[options[v]] for v, amounts in self._amounts.items()))

    def least_amount(self, largest: int = LARGEST) -> float:
        """The smallest amount of a combination of finite cost."""
        legal = [Table(t.scope, np.where(np.isinf(t.costs), np.inf, 0.0)) for t in self._tables]
        legal += [Table((v,), amounts) for v, amounts in self._amounts.items()]
        return self._minimum(legal, largest).cost

    def _minimum(self, tables: list[Table], largest: int) -> Solution:
        elimination = _Elimination(self.sizes, tables, set())
        if not elimination.run(largest):
            elimination = _Elimination(self.sizes, tables, set())
            elimination.run(min(largest, _CORE_LARGEST))
        return self._finish(elimination, math.inf)

    def _finish(self, elimination: _Elimination, bound: float) -> Solution:
        core = elimination.alive
        amounts = {} if math.isinf(bound) else self._amounts
        chosen = solve_core(self.sizes, core, elimination.tables, amounts, bound) if core else {}
        if chosen is None:
            raise NoSolutionError
        options = elimination.choose(chosen)
        cost = elimination.cost(options)
        if math.isinf(cost):
            raise NoSolutionError
        return Solution(options, cost)


class _Elimination:
    """Eliminates variables one after the other; `alive` and `tables` are what is left."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table], keep: set[int]) -> None:
        self.sizes = sizes
        self.all_tables = tables
        self.keep = keep
        self.alive = list(range(len(sizes)))
        self.steps: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
        self._tables: dict[int, Table] = {}
        self._of: list[dict[int, None]] = [{} for _ in sizes]
        self._count = 0
        for table in tables:
            self._add(table)

    @property
    def tables(self) -> list[Table]:
        """The tables over the variables that are left."""
        return list(self._tables.values())

    def run(self, largest: int) -> bool:
        """Eliminate all variables that take no table of more than `largest` entries; if all."""
        heap = [(self._entries(v), v) for v in self.alive if v not in self.keep]
        heapq.heapify(heap)
        gone: set[int] = set()
        while heap:
            entries, variable = heapq.heappop(heap)
            if variable in gone or entries != self._entries(variable) or entries > largest:
                continue  # gone, listed again since, or too large until a neighbour goes
            gone.add(variable)
            for neighbour in self._eliminate(variable):
                if neighbour not in self.keep:
                    heapq.heappush(heap, (self._entries(neighbour), neighbour))
        self.alive = [v for v in self.alive if v not in gone]
        return not self.alive

    def choose(self, options: dict[int, int]) -> list[int]:
        """The best option of every variable, given those of the variables that are left."""
        found = dict(options)
        for variable, scope, best in reversed(self.steps):
            found[variable] = int(best[tuple(found[v] for v in scope)])
        return [found[v] for v in range(len(self.sizes))]

    def cost(self, options: Sequence[int]) -> float:
        """The cost of a combination under the tables that this began with."""
        costs = (float(t.costs[tuple(options[v] for v in t.scope)]) for t in self.all_tables)
        return math.fsum(costs)

    def _add(self, table: Table) -> None:
        for variable in table.scope:
            self._of[variable][self._count] = None
        self._tables[self._count] = table
        self._count += 1

    def _scope(self, variable: int) -> tuple[int, ...]:
        """The variable's neighbours, then itself."""
        near = {v: None for t in self._of[variable] for v in self._tables[t].scope if v != variable}
        return (*near, variable)

    def _entries(self, variable: int) -> int:
        return math.prod(self.sizes[v] for v in self._scope(variable))

    def _eliminate(self, variable: int) -> tuple[int, ...]:
        scope = self._scope(variable)
        total = np.zeros([self.sizes[v] for v in scope])
        for index in list(self._of[variable]):
            table = self._tables.pop(index)
            for v in table.scope:
                del self._of[v][index]
            total += _spread(table, scope)
        least = total.min(axis=-1)
        # the first of equal options, however rounding ordered them
        best = (total <= (least * (1 + _TIE))[..., None]).argmax(axis=-1)
        neighbours = scope[:-1]
        self.steps.append((variable, neighbours, best))
        if neighbours:
            self._add(Table(neighbours, least))
        return neighbours


def _spread(table: Table, scope: tuple[int, ...]) -> Numbers:
    """The table's costs with the axes of `scope`, of length 1 where it lacks the variable."""
    position = {v: i for i, v in enumerate(scope)}
    order = sorted(range(len(table.scope)), key=lambda i: position[table.scope[i]])
    shape = [1] * len(scope)
    for v, length in zip(table.scope, table.costs.shape, strict=True):
        shape[position[v]] = length
    return table.costs.transpose(order).reshape(shape)
