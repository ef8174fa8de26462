"""Placements: what one mesh axis does to a value.

A value is replicated over an axis, sharded along a dim, or partial (the true value is a reduction
over the axis). A sharded dim may consist of *segments*, runs that are each split over the axis: the
q, k and v of a fused weight, or the rows of each sample in a flattened `(batch sequence)` dim.

    Shard(0)                 [a b c d | e f g h]           rank 0: a b c d
    Shard(0, 2)              [a b | c d][e f | g h]        rank 0: a b e f
    Shard(0, (4, 2, 2))      [a b | c d][e | f][g | h]     rank 0: a b e g

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
class Shard:
    """Each segment of `dim` is split evenly over the axis.

    `segments` is a number of equal runs, or the lengths of unequal runs; in terms of the dim's
    global length.
    """

    dim: int
    segments: Segments = 1

    def run_lengths(self, length: int) -> tuple[int, ...]:
        """Lengths of the runs of a dim of global length `length`."""
        if isinstance(self.segments, tuple):
            return self.segments
        return (length // self.segments,) * self.segments

    def divides(self, length: int, size: int) -> bool:
        """Whether every run of a dim of `length` splits evenly over `size` ranks."""
        if isinstance(self.segments, tuple):
            return sum(self.segments) == length and all(run % size == 0 for run in self.segments)
        return length % (self.segments * size) == 0 and length > 0

    def __str__(self) -> str:
        if self.segments == 1:
            return f"S{self.dim}"
        inner = (
            self.segments if isinstance(self.segments, int) else "+".join(map(str, self.segments))
        )
        return f"S{self.dim}/{inner}"


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


def sharded(dim: int, segments: Segments = 1) -> State:
    """The state of a value sharded along `dim`."""
    placement = Shard(dim, segments)
    return State(placement, placement)


def shard_of(tensor: torch.Tensor, placement: Shard, size: int, index: int) -> torch.Tensor:
    """The part of a whole `tensor` that the rank at `index` of an axis of `size` holds."""
    lengths = placement.run_lengths(tensor.shape[placement.dim])
    runs = torch.split(tensor, list(lengths), placement.dim)
    parts = [run.chunk(size, placement.dim)[index] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, placement.dim)


def unshard(parts: Sequence[torch.Tensor], placement: Shard) -> torch.Tensor:
    """The whole tensor from the parts of all ranks of an axis, in order."""
    size = len(parts)
    dim = placement.dim
    whole = sum(part.shape[dim] for part in parts)
    runs = [length // size for length in placement.run_lengths(whole)]
    pieces = [torch.split(part, runs, dim) for part in parts]
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
