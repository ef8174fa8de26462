"""How ZeRO splits what a rank holds of a parameter among its neighbours on dp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DataShard:
    """A dim of a rank's tensor, in `parts` runs of equal length, the last ones padded with zeros.

    Neighbours on dp, `parts` at a time, hold a run each. Since all runs have one shape, ranks that
    differ only on dp have one program. Zeros stay zeros: their gradient is zero, and an optimizer
    moves a parameter of zero with a gradient of zero nowhere.
    """

    dim: int
    parts: int

    @classmethod
    def choose(cls, shape: Sequence[int], parts: int) -> DataShard | None:
        """The dim that takes the least padding, the first of equals; None where there is none."""
        if not shape or 0 in shape or parts == 1:
            return None
        padded = [-(-length // parts) * parts / length for length in shape]
        return cls(padded.index(min(padded)), parts)

    def run(self, length: int) -> int:
        """The length of each run of a dim of `length`, padding included."""
        return -(-length // self.parts)

    def shape(self, whole: Sequence[int]) -> Shape:
        """The shape of a shard, padding included."""
        return tuple(self.run(n) if dim == self.dim else n for dim, n in enumerate(whole))

    def bounds(self, length: int, index: int) -> tuple[int, int]:
        """First index of run `index` and one past its last, of a dim of `length`, no padding."""
        run = self.run(length)
        return min(index * run, length), min((index + 1) * run, length)

    def pad(self, part: Tensor, length: int) -> Tensor:
        """A run without padding as it is held: with zeros up to the length of a run."""
        missing = self.run(length) - part.shape[self.dim]
        if not missing:
            return part
        shape = list(part.shape)
        shape[self.dim] = missing
        return torch.cat([part, part.new_zeros(shape)], self.dim)

    def shard(self, whole: Tensor, index: int) -> Tensor:
        """Shard `index` of a tensor; a view where nothing is padded."""
        length = whole.shape[self.dim]
        first, last = self.bounds(length, index)
        return self.pad(whole.narrow(self.dim, first, last - first), length)

    def whole(self, shards: Sequence[Tensor], length: int) -> Tensor:
        """The tensor that the shards are of, whose dim has `length`."""
        return torch.cat(list(shards), self.dim).narrow(self.dim, 0, length)
