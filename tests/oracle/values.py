"""Values on several simulated ranks, and the communication between them.

A value knows what each rank holds in the plainest way: for a sharded dim, the global indices that
each rank has. Nothing here is shared with MSC's placements, rules or collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Value:
    """One tensor per rank.

    dim None: every rank has the whole value, or, if `partial`, a term of a sum of the whole.
    dim d: rank r has the rows `indices[r]` of dim d; every index is on exactly one rank.
    """

    parts: tuple[Tensor, ...]
    dim: int | None = None
    indices: tuple[Tensor, ...] = ()
    partial: bool = False

    @property
    def ranks(self) -> range:
        return range(len(self.parts))

    @property
    def replicated(self) -> bool:
        return self.dim is None and not self.partial

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        shape = list(self.parts[0].shape)
        if self.dim is not None:
            shape[self.dim] = sum(len(index) for index in self.indices)
        return tuple(shape)

    def same_shard(self, other: Value) -> bool:
        """Whether both are sharded over the same global indices, of whatever dims."""
        return (
            self.dim is not None
            and other.dim is not None
            and all(map(torch.equal, self.indices, other.indices))
        )

    def map(self, function: Callable[..., Any], *others: Value, **how: Any) -> Value:
        """A value of `function` of every rank's parts; `how` is the placement of the result."""
        found = [function(*(value.parts[rank] for value in (self, *others))) for rank in self.ranks]
        return Value(tuple(found), **how)


def everywhere(tensor: Tensor, ranks: int) -> Value:
    """A value that all ranks have, each a copy of its own."""
    return Value(tuple(tensor.clone() for _ in range(ranks)))


def take(value: Value, dim: int, indices: Sequence[Tensor]) -> Value:
    """A replicated value, of which each rank keeps its own indices of a dim; no communication."""
    assert value.replicated
    dim %= len(value.shape)
    parts = [p.index_select(dim, i) for p, i in zip(value.parts, indices, strict=True)]
    return Value(tuple(parts), dim, tuple(indices))


def whole(value: Value) -> Value:
    """The value on every rank: an all-reduce of terms, an all-gather of rows."""
    if value.partial:
        total = torch.stack(value.parts).sum(0)
        return everywhere(total, len(value.parts))
    if value.dim is None:
        return value
    order = torch.cat(value.indices).argsort()
    gathered = torch.cat(value.parts, value.dim).index_select(value.dim, order)
    return everywhere(gathered, len(value.parts))


def reduced(value: Value) -> Value:
    """The value with an owed sum done."""
    return whole(value) if value.partial else value
