"""Factor rules: how an op's operands and results share dimensions, and what follows for sharding.

A *factor* is a dimension that operands and results share: in `mk,kn->mn` the factor `k` is
contracted, so that sharding it leaves a partial sum. A tensor's dim is a product of factors, major
to minor (`(b s) d`), and may consist of several *runs* one after the other (the q, k and v of a
fused weight). From a rule follow all the ways in which the op can run on shards: its strategies.

In the spirit of Shardy's sharding rules (openxla/shardy) and nnScaler's annotations (OSDI 2024).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from msc.ir.placement import (
    EVEN,
    PARTIAL,
    REPLICATED,
    VARYING,
    Partial,
    ReduceOp,
    Replicate,
    Shard,
    Split,
    State,
    sharded,
)

Factor = tuple[str, int]
"""Name and global length."""
Run = tuple[Factor, ...]
"""A product of factors, major to minor."""
Dim = tuple[Run, ...]
"""One run, or several one after the other; a factor that all runs have shards all of them."""
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Call:
    """One op of a graph on global shapes, free of torch.fx.

    `operands` are the tensors among `args` and `kwargs` in `tree_flatten((args, kwargs))` order;
    `results` the tensors that the op returns, in order.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]


class LocalCall(ABC):
    """The same op about to run on shards; a rule's `localize` turns it into what really runs."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operand_shapes: tuple[tuple[int, ...], ...]  # local
    result_shapes: tuple[tuple[int, ...], ...]  # local

    @abstractmethod
    def start(self, factor: str) -> Any:
        """First index of this rank's shard of `factor`: a 0-dim int64 value, or None if whole."""

    @abstractmethod
    def coordinates(self, result: int, dim: int) -> Any:
        """Global index of each local index along a result's dim: 1-D int64, or None if whole."""


Localized = tuple[Any, tuple[Any, ...], dict[str, Any]]
Localize = Callable[[LocalCall], Localized]


@dataclass(frozen=True)
class Rule:
    """How one call's operands and results share dimensions.

    operands, results: dims of each tensor, as products of factors; `()` for a scalar tensor.
    contracted: factor -> what a result that lacks it becomes when the factor is sharded: one
        reduction for all results, or one for each.
    whole: factors that cannot be sharded at all (the normalized dim of a norm).
    contiguous: factors that no segments may split, since a rank's part has to be an interval (the
        rows of an embedding table, which `LocalCall.start` describes).
    linear: groups of operand positions in which the op is jointly linear; a group that is partial
        makes every result partial.
    localize: rewrites target and arguments for local shapes; None keeps them. The target may be a
        plain function of ATen ops (a mean over a sharded dim is a sum, times a number).
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    contracted: Mapping[str, ReduceOp | tuple[ReduceOp, ...]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    localize: Localize | None = None


@dataclass(frozen=True)
class Strategy:
    """One legal way to run a call over one axis: the states of its operands and results.

    split: how `factor` is split; share: the largest part of it that a rank has.
    """

    operands: tuple[State, ...]
    results: tuple[State, ...]
    factor: str | None = None
    split: Split = EVEN
    share: float = 1.0

    def __str__(self) -> str:
        operands, results = (", ".join(map(str, part)) for part in (self.operands, self.results))
        return f"{self.factor or '-'}: {operands} -> {results}"


def placement_of(dims: Dims, factor: str, split: Split = EVEN) -> Shard | None:
    """The placement of a tensor when `factor` is sharded; None if the tensor lacks it.

    `split` says how the factor itself is split: run by run (a fused weight's columns), in units.
    """
    for index, dim in enumerate(dims):
        pieces: list[int] = []
        units: set[int] = set()
        for run in dim:
            names = [name for name, _ in run]
            if factor not in names:
                break
            position = names.index(factor)
            outer = math.prod(length for _, length in run[:position])
            inner = math.prod(length for _, length in run[position + 1 :])
            own = split.run_lengths(run[position][1])
            pieces.extend([part * inner for part in own] * outer)
            units.add(split.unit * inner)
        else:
            if pieces and len(units) == 1:
                segments = len(pieces) if len(set(pieces)) == 1 else tuple(pieces)
                return Shard(index, segments, units.pop())
    return None


def factor_of(dims: Dims, placement: Shard) -> tuple[str, Split] | None:
    """The factor, with its split, whose sharding gives `placement`; None if there is none.

    The inverse of `placement_of`, for factors that can be split at all (longer than 1).
    """
    if placement.dim >= len(dims):
        return None
    dim = dims[placement.dim]
    total = sum(math.prod(length for _, length in run) for run in dim)
    pieces = placement.run_lengths(total)
    for name in dict(dim[0]):
        for split in _splits_within(dim, name, pieces, placement.unit):
            found = placement_of(dims, name, split)
            if found is not None and found.run_lengths(total) == pieces:
                return name, split
    return None


def _splits_within(dim: Dim, name: str, pieces: tuple[int, ...], unit: int) -> Iterator[Split]:
    """Splits of a factor that may split a dim into runs of the lengths `pieces`."""
    places: list[tuple[int, int, int]] = []  # what is major to it, its length, what is minor
    for run in dim:
        lengths = dict(run)
        if name not in lengths:
            return
        at = list(lengths).index(name)
        outer, inner = (math.prod(n for _, n in part) for part in (run[:at], run[at + 1 :]))
        places.append((outer, lengths[name], inner))
    within, rest = divmod(len(pieces), sum(outer for outer, _, _ in places))
    if rest or not within:
        return
    inner = places[0][2]
    if unit and (not inner or unit % inner or any(other != inner for _, _, other in places)):
        return
    own_unit = unit // inner if unit else 0
    if all(length % within == 0 and length > within for _, length, _ in places):
        yield Split(within, own_unit)
    own = tuple(piece // inner for piece in pieces[:within]) if inner else ()
    if min(own, default=0) > 1 and all(sum(own) == other for _, other, _ in places):
        yield Split(own, own_unit)


def strategies(
    rule: Rule | None,
    num_operands: int,
    num_results: int,
    size: int,
    candidates: Sequence[tuple[str, Split]] = (),
    uneven: bool = False,
) -> list[Strategy]:
    """Every legal way to run a call over an axis of `size` ranks.

    `candidates` names factors with splits beyond the plain ones, as found by propagating
    placements from the neighbours. Without a rule only replication is legal. `uneven` allows
    parts of unequal length.
    """
    found = [
        Strategy((REPLICATED,) * num_operands, (REPLICATED,) * num_results),
        Strategy((VARYING,) * num_operands, (VARYING,) * num_results),
    ]
    if rule is None:
        return found
    for group in rule.linear:
        operands = tuple(PARTIAL if i in group else VARYING for i in range(num_operands))
        found.append(Strategy(operands, (PARTIAL,) * num_results))
    wanted = dict.fromkeys([*((name, EVEN) for name in factors(rule)), *candidates])
    for factor, split in wanted:
        strategy = shard_factor(rule, factor, split, size, uneven)
        if strategy is not None and strategy not in found:
            found.append(strategy)
    return found


def factors(rule: Rule) -> dict[str, int]:
    """The rule's factors that may be sharded, in order of appearance, with a length."""
    names: dict[str, int] = {}
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            for run in dim:
                for name, length in run:
                    names.setdefault(name, length)
    return {name: length for name, length in names.items() if name not in rule.whole}


def shard_factor(
    rule: Rule, factor: str, split: Split, size: int, uneven: bool = False
) -> Strategy | None:
    """The strategy that shards `factor` over `size` ranks; None if it is not legal.

    With `uneven`, a factor that does not split evenly is split in units: those of `split`, or 1.
    """
    if factor in rule.whole or (split.segments != 1 and factor in rule.contiguous):
        return None
    lengths = _lengths(rule, factor)
    if not lengths:
        return None
    fitted = _fit(split, lengths, size, uneven)
    if fitted is None:
        return None
    split, share = fitted
    operands = tuple(_operand_state(dims, factor, split) for dims in rule.operands)
    if split.unit and not all(_placed_alike(dims, factor, split) for dims in rule.operands):
        return None
    results: list[State] = []
    for index, dims in enumerate(rule.results):
        placement = placement_of(dims, factor, split)
        if placement is not None:
            results.append(State(placement, placement))
            continue
        reduction = rule.contracted.get(factor)
        if reduction is None or not _placed_alike(dims, factor, split):
            return None
        op = reduction if isinstance(reduction, str) else reduction[index]
        results.append(State(Partial(op), Replicate()))
    return Strategy(operands, tuple(results), factor, split, share)


def _lengths(rule: Rule, factor: str) -> set[int]:
    """The lengths that a factor has; none if a dim has it in some of its runs only."""
    found: set[int] = set()
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            shares = [[length for name, length in run if name == factor] for run in dim]
            if not any(shares):
                continue
            if not all(shares):
                return set()
            found.update(length for (length,) in shares)
    return found


def _fit(split: Split, lengths: set[int], size: int, uneven: bool) -> tuple[Split, float] | None:
    """The split in its one form for these lengths, and the largest part that a rank has."""
    even = Split(split.segments)
    if all(even.divides(length, size) for length in lengths):
        units = [
            run // split.unit if split.unit else size
            for n in lengths
            for run in even.run_lengths(n)
        ]
        if all(count % size == 0 for count in units):
            return even, 1 / size
    if not uneven:
        return None
    split = Split(split.segments, split.unit or 1)
    if not all(split.divides(length, size) for length in lengths):
        return None
    runs = [run for length in lengths for run in split.run_lengths(length)]
    if min(runs) < size * split.unit:
        return None  # a rank without a part gains nothing, and many ops refuse empty tensors
    return split, max(split.part(run, size, 0) / run for run in runs)


def _placed_alike(dims: Dims, factor: str, split: Split) -> bool:
    """Whether a tensor lacks the factor, or can be sharded by it in these units."""
    has = any(name == factor for dim in dims for run in dim for name, _ in run)
    return not has or placement_of(dims, factor, split) is not None


def _operand_state(dims: Dims, factor: str, split: Split) -> State:
    placement = placement_of(dims, factor, split)
    if placement is None:
        return VARYING
    return sharded(placement.dim, placement.segments, placement.unit)
