"""Placements: what one mesh axis does to a value.

A value is replicated over an axis, sharded along a dim, or partial (the true value is a reduction
over the axis). A sharded dim may consist of *segments*, runs that are each split over the axis: the
q, k and v of a fused weight, or the rows of each sample in a flattened `(batch sequence)` dim.

    Shard(0)                 [a b c d | e f g h]           rank 0: a b c d
    Shard(0, 2)              [a b | c d][e f | g h]        rank 0: a b e f
    Shard(0, (4, 2, 2))      [a b | c d][e | f][g | h]     rank 0: a b e g
    Shard(0, 1, unit=2)      [a b c d | e f]               rank 0: a b c d    uneven, in pairs

`torch.distributed.tensor` placements are the user's spelling of the same thing (`from_torch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Segments = int | tuple[int, ...]
ReduceOp = Literal["sum", "max", "logsumexp"]


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Split:
    """How a length is split over an axis: each of its runs into one part per rank.

    segments: a number of equal runs, or the lengths of unequal runs; in terms of the global length.
    unit: 0 where every run splits evenly. Otherwise parts are whole multiples of `unit` (a head),
        as equal as possible, and the first ranks have the larger ones.
    """

    segments: Segments = 1
    unit: int = 0

    def run_lengths(self, length: int) -> tuple[int, ...]:
        """Lengths of the runs of a global length."""
        if isinstance(self.segments, tuple):
            return self.segments
        return (length // self.segments,) * self.segments

    def part(self, run: int, size: int, index: int) -> int:
        """Length of the part of a run that the rank at `index` of an axis of `size` has."""
        if not self.unit:
            return run // size
        each, more = divmod(run // self.unit, size)
        return (each + (index < more)) * self.unit

    def divides(self, length: int, size: int) -> bool:
        """Whether a length consists of these runs, and every run splits over `size` ranks."""
        if isinstance(self.segments, tuple):
            whole = sum(self.segments) == length
        else:
            whole = length % self.segments == 0
        unit = self.unit or size
        return whole and length > 0 and all(run % unit == 0 for run in self.run_lengths(length))

    def __str__(self) -> str:
        text = ""
        if self.segments != 1:
            runs = (self.segments,) if isinstance(self.segments, int) else self.segments
            text = "/" + "+".join(map(str, runs))
        return text + (f"@{self.unit}" if self.unit else "")


EVEN = Split()
"""One run, in equal parts."""


@dataclass(frozen=True, init=False)
class Shard(Split):
    """`dim` is split over the axis, as the `Split` says."""

    dim: int = 0

    # written out, so that the dim comes first, as in torch's placements
    def __init__(self, dim: int, segments: Segments = 1, unit: int = 0) -> None:
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "unit", unit)

    @property
    def split(self) -> Split:
        """How the dim is split."""
        return Split(self.segments, self.unit)

    def __repr__(self) -> str:
        return f"Shard({self.dim}, {self.segments}, unit={self.unit})"

    def __str__(self) -> str:
        return f"S{self.dim}{super().__str__()}"


@dataclass(frozen=True)
class Partial:
    """The value is the reduction of the ranks' values: sum, max, or log-sum-exp."""

    op: ReduceOp = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P{self.op}"


Placement = Replicate | Shard | Partial


@dataclass(frozen=True)
class State:
    """A value's placement and the placement of its gradient, over one axis.

    The gradient of a sharded value is sharded alike; of a partial value, replicated. A replicated
    value's gradient is replicated (`R`), or partial (`R~`) where each rank contributes a part,
    for example because the value enters a GEMM whose weight is sharded by columns.
    """

    value: Placement
    grad: Placement

    def __str__(self) -> str:
        return "R~" if self == VARYING else str(self.value)


REPLICATED = State(Replicate(), Replicate())
VARYING = State(Replicate(), Partial())
PARTIAL = State(Partial(), Replicate())


def sharded(dim: int, segments: Segments = 1, unit: int = 0) -> State:
    """The state of a value sharded along `dim`."""
    placement = Shard(dim, segments, unit)
    return State(placement, placement)


def shard_of(tensor: torch.Tensor, placement: Shard, size: int, index: int) -> torch.Tensor:
    """The part of a whole `tensor` that the rank at `index` of an axis of `size` holds."""
    dim = placement.dim
    parts: list[torch.Tensor] = []
    for run in torch.split(tensor, list(placement.run_lengths(tensor.shape[dim])), dim):
        lengths = [placement.part(run.shape[dim], size, rank) for rank in range(size)]
        parts.append(run.narrow(dim, sum(lengths[:index]), lengths[index]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(parts: Sequence[torch.Tensor], placement: Shard) -> torch.Tensor:
    """The whole tensor from the parts of all ranks of an axis, in order."""
    size = len(parts)
    dim = placement.dim
    runs = placement.run_lengths(sum(part.shape[dim] for part in parts))
    pieces = [
        torch.split(part, [placement.part(run, size, rank) for run in runs], dim)
        for rank, part in enumerate(parts)
    ]
    return torch.cat([pieces[rank][run] for run in range(len(runs)) for rank in range(size)], dim)


def from_torch(placement: Any) -> Placement:
    """Translate a `torch.distributed.tensor` placement; MSC's own pass through."""
    if isinstance(placement, (Replicate, Shard, Partial)):
        return placement
    from torch.distributed.tensor import placement_types as torch_placements

    if isinstance(placement, torch_placements.Replicate):
        return Replicate()
    if isinstance(placement, torch_placements.Shard):
        return Shard(placement.dim)
    if isinstance(placement, torch_placements.Partial):
        if placement.reduce_op == "sum":
            return Partial("sum")
        if placement.reduce_op == "max":
            return Partial("max")
    raise TypeError(f"{placement!r} is not a placement that MSC knows")
