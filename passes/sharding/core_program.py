"""The integer program of a cost network: what elimination leaves, and what a bound ties together.

A binary variable for each option, and one between 0 and 1 for each entry of a table, which add up
to the options that they belong to. Solved by HiGHS (scipy.optimize.milp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_REFINEMENTS = 4
_NODES = 100_000  # a limit of the search tree, not of time: results are the same on every machine


@dataclass(frozen=True)
class Table:
    """Costs of each combination of some variables' options; an axis of `costs` for each."""

    scope: tuple[int, ...]
    costs: NDArray[np.float64]


def solve_core(
    sizes: Sequence[int],
    variables: Sequence[int],
    tables: Sequence[Table],
    amounts: Mapping[int, NDArray[np.float64]],
    bound: float,
) -> dict[int, int] | None:
    """The option of each of `variables` at the least cost; None if there is no solution.

    `sizes[v]` is the number of options of v. The options' `amounts` add up to at most `bound`, to
    within the solver's tolerance, a millionth of it.
    """
    rows = _Rows()
    columns = {v: [rows.column(0.0, binary=True) for _ in range(sizes[v])] for v in variables}
    for options in columns.values():
        rows.row([(column, 1.0) for column in options], 1, 1)
    for table in tables:
        _add_table(rows, columns, table)
    if amounts:
        scale = bound or 1.0
        terms = [(c, a / scale) for v, own in amounts.items() for c, a in _pairs(columns[v], own)]
        rows.row(terms, -np.inf, bound / scale)
    solution = rows.solve()
    if solution is None:
        return None
    return {v: int(np.argmax(solution[options])) for v, options in columns.items()}


def _pairs(columns: Sequence[int], amounts: NDArray[np.float64]) -> list[tuple[int, float]]:
    return list(zip(columns, map(float, amounts), strict=True))


def _add_table(rows: _Rows, columns: Mapping[int, Sequence[int]], table: Table) -> None:
    least = float(table.costs.min())
    if len(table.scope) == 1:
        for column, cost in zip(columns[table.scope[0]], table.costs, strict=True):
            rows.costs[column] += float(cost) - (least if np.isfinite(least) else 0.0)
        return
    terms: dict[tuple[int, int], list[tuple[int, float]]] = {
        (axis, option): []
        for axis, length in enumerate(table.costs.shape)
        for option in range(length)
    }
    for entry in np.argwhere(np.isfinite(table.costs)):
        column = rows.column(float(table.costs[tuple(entry)]) - least)
        for axis, option in enumerate(entry):
            terms[axis, int(option)].append((column, 1.0))
    for (axis, option), entries in terms.items():
        rows.row([*entries, (columns[table.scope[axis]][option], -1.0)], 0, 0)


@dataclass
class _Rows:
    """A mixed integer program under construction, all of whose variables are from 0 to 1."""

    costs: list[float] = field(default_factory=list)
    binary: list[int] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def column(self, cost: float, binary: bool = False) -> int:
        self.costs.append(cost)
        self.binary.append(int(binary))
        return len(self.costs) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        self.entries += [(len(self.lower), column, entry) for column, entry in terms]
        self.lower.append(lower)
        self.upper.append(upper)

    def solve(self) -> NDArray[np.float64] | None:
        """Values of all variables; None if there is no solution.

        Costs span more orders of magnitude than the solver's tolerances. A variable that alone
        costs more than a solution cannot be part of a better one, so it is fixed to 0, the rest is
        scaled up, and the program is solved again, until nothing more is fixed.
        """
        costs = np.asarray(self.costs)
        upper = np.where(np.isinf(costs), 0.0, 1.0)
        best: NDArray[np.float64] | None = None
        bound = np.inf
        for _ in range(_REFINEMENTS):
            result = self._milp(np.where(upper > 0, costs, 0.0), upper)
            if result.x is None:
                break
            cost = float(np.where(upper > 0, costs, 0.0) @ np.round(result.x))
            if cost < bound or best is None:
                best, bound = result.x, cost
            fixed = costs > bound
            if not np.any(fixed & (upper > 0)):
                break
            upper[fixed] = 0.0
        return best

    def _milp(self, costs: NDArray[np.float64], upper: NDArray[np.float64]) -> Any:
        from scipy import sparse  # which takes longer to import than a rank's part of MSC
        from scipy.optimize import Bounds, LinearConstraint, milp

        rows, columns, entries = zip(*self.entries, strict=True)
        shape = (len(self.lower), len(self.costs))
        matrix = sparse.coo_matrix((entries, (rows, columns)), shape=shape).tocsr()
        return milp(
            costs / (costs.max() or 1.0),
            constraints=LinearConstraint(matrix, np.asarray(self.lower), np.asarray(self.upper)),
            integrality=np.asarray(self.binary),
            bounds=Bounds(0, upper),
            options={"mip_rel_gap": 1e-9, "node_limit": _NODES},
        )
