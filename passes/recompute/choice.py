"""The cheapest choice of what to recompute in a pipeline stage, within a bound on what is saved.

An integer program over the calls of the stage's distinct blocks, all instances of a block choosing
alike. For each call two binary variables: it runs again, its value is kept. What the backward reads
is kept or runs again; what runs again has its operands kept or run again; values that lie in the
same memory are kept together. Minimized is the cost of what runs again. This is the exact form of
Checkmate's program (Jain et al., MLSys 2020) for blocks whose backward runs right after what it
recomputes. Solved by HiGHS (scipy.optimize.milp).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from msc.ir.torch_private import storage_key
from msc.ir.values import tensors_of
from msc.ir.walks import ancestors
from msc.passes.recompute.kept_bytes import kept_bytes
from msc.passes.recompute.rewrite import can_be_saved, kept_nodes, recomputed

_NODES = 100_000  # a limit of the search tree, not of time: results are the same on every machine
_TIE = 1e-9  # of two choices that cost the same, the one that keeps less


@dataclass(frozen=True)
class Candidates:
    """A distinct block of a stage.

    saved: the nodes of its forward that the backward reads. copies: how often its values are alive
    at once: instances times micro-batches in flight. named: for each policy that the stage may also
    follow as a whole, the calls that it lets run again.
    """

    name: str
    forward: fx.GraphModule
    saved: tuple[fx.Node, ...]
    copies: int
    named: tuple[Collection[fx.Node], ...] = ()


@dataclass(frozen=True)
class Choice:
    """again: for each block the calls that run again; cost, saved_bytes: of all copies."""

    again: dict[str, frozenset[fx.Node]]
    cost: float
    saved_bytes: int


class StageProgram:
    """The integer program of one stage; `cost` is that of running a call again once."""

    def __init__(self, blocks: Sequence[Candidates], cost: Callable[[fx.Node], float]) -> None:
        self._blocks = blocks
        self._columns = _Columns()
        self._rows = _Rows()
        self._again: dict[fx.Node, int] = {}
        self._memory: dict[fx.Node, int] = {}
        for block in blocks:
            self._add(block, cost)

    def choice(self, calls: Sequence[Collection[fx.Node]]) -> Choice:
        """The choice of letting `calls` of each block run again, as far as the backward needs."""
        chosen = np.zeros(len(self._columns.costs))
        again = {}
        for block, allowed in zip(self._blocks, calls, strict=True):
            running = recomputed(block.saved, allowed)
            again[block.name] = frozenset(running)
            chosen[[self._again[node] for node in running]] = 1
            kept = kept_nodes(block.forward, block.saved, running)
            chosen[[self._memory[node] for node in kept]] = 1
        return Choice(again, float(chosen @ self._columns.costs), int(chosen @ self._columns.sizes))

    def everything_saved(self) -> Choice:
        """The choice of running nothing again."""
        return self.choice([()] * len(self._blocks))

    def named(self) -> list[Choice]:
        """The choices of the policies that the blocks name."""
        return [self.choice(calls) for calls in zip(*(b.named for b in self._blocks), strict=True)]

    def cheapest(self, limit: float) -> Choice | None:
        """The choice of least cost that saves at most `limit` bytes; None if there is none."""
        costs = np.asarray(self._columns.costs)

        sizes = np.asarray(self._columns.sizes, dtype=np.float64)
        scale, total = costs.max(initial=0.0) or 1.0, sizes.sum() or 1.0
        return self._solve(costs / scale + _TIE * sizes / total, limit)

    def leanest(self) -> Choice:
        """A choice that saves as few bytes as possible."""
        sizes = np.asarray(self._columns.sizes, dtype=np.float64)
        costs = np.asarray(self._columns.costs)
        scale, total = costs.sum() or 1.0, sizes.max(initial=0.0) or 1.0
        found = self._solve(sizes / total + _TIE * costs / scale, np.inf)
        assert found is not None  # to keep everything is a solution
        return found

    def _add(self, block: Candidates, cost: Callable[[fx.Node], float]) -> None:
        needed = ancestors(block.saved)
        again: dict[fx.Node, int] = {}
        kept: dict[fx.Node, int] = {}
        memory: dict[int, int] = {}
        for node in block.forward.graph.nodes:
            if node not in needed:
                continue
            if node.op == "call_function":
                again[node] = self._columns.add(cost=block.copies * cost(node))
            if can_be_saved(node):
                kept[node] = self._columns.add()
                key = storage_key(tensors_of(node)[0])
                if key not in memory:
                    memory[key] = self._columns.add(size=block.copies * kept_bytes(node))
                self._memory[node] = memory[key]
                self._rows.at_least(0, {memory[key]: 1, kept[node]: -1})

        def there(node: fx.Node) -> dict[int, int]:
            return {column[node]: 1 for column in (again, kept) if node in column}

        for node in block.saved:
            self._rows.at_least(1, there(node))
        for node, column in again.items():
            for operand in node.all_input_nodes:
                self._rows.at_least(0, {**there(operand), column: -1})
        self._again |= again

    def _solve(self, objective: NDArray[np.float64], limit: float) -> Choice | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # long to import, and seldom used

        sizes = np.asarray(self._columns.sizes, dtype=np.float64)
        total = sizes.sum() or 1.0
        rows, lower = self._rows.matrix(len(sizes))
        constraints = [LinearConstraint(rows, lower, np.inf)]
        if np.isfinite(limit):
            constraints.append(LinearConstraint(sizes / total, -np.inf, limit / total))
        result = milp(
            objective,
            constraints=constraints,
            integrality=np.ones(len(sizes)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0, "node_limit": _NODES},
        )
        if result.x is None:
            return None
        chosen = np.round(result.x)
        running = {node for node, column in self._again.items() if chosen[column]}
        return self.choice([running] * len(self._blocks))


@dataclass
class _Columns:
    """Variables between 0 and 1."""

    costs: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, cost: float = 0.0, size: int = 0) -> int:
        self.costs.append(cost)
        self.sizes.append(size)
        return len(self.costs) - 1


@dataclass
class _Rows:
    """Sums of variables with a lower bound."""

    entries: list[tuple[int, int, int]] = field(default_factory=list)
    lower: list[int] = field(default_factory=list)

    def at_least(self, bound: int, factors: dict[int, int]) -> None:
        self.entries += [(len(self.lower), column, factor) for column, factor in factors.items()]
        self.lower.append(bound)

    def matrix(self, num_columns: int) -> tuple[Any, NDArray[np.float64]]:
        """Factors by row and column, sparse, and what each row must reach."""
        from scipy import sparse

        rows, columns, factors = zip(*self.entries, strict=True)
        shape = (len(self.lower), num_columns)
        matrix = sparse.coo_matrix((factors, (rows, columns)), shape=shape).tocsr()
        return matrix, np.asarray(self.lower, dtype=np.float64)
