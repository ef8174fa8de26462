"""Initial values as data: steps that fill a tensor, drawn for any part of it alone.

    normal(0, 0.02)                      every element
    zero of [1600, 1616)                 then these flat indices: a row of 16

A random number depends on the seed, the tensor's name, the number of the step and the element's
index in the whole tensor, so a rank draws its shard without the rest, and on every mesh the same.
Steps are taken in float64 and rounded once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.ir.ops.random import GOLDEN, flat_indices, mix_

_BLOCK_ELEMENTS = 1 << 16  # drawn at a time, which stays in the cache and bounds the memory


@dataclass(frozen=True)
class Step:
    """One in-place op with numbers for arguments, on the flat indices [start, stop) of a tensor."""

    op: str
    args: tuple[float | None, ...]
    start: int
    stop: int


FILLS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda keys, low, high: _uniform(keys, 1) * (high - low) + low,
    "normal": lambda keys, mean, std: _normal(keys) * std + mean,
    "fill": lambda keys, value: torch.full_like(keys, value, dtype=torch.float64),
}
"""Steps that need no value before them: (hashes of the elements, int64; numbers) -> float64."""

CHANGES: dict[str, Callable[..., Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "add": torch.add,
    "sub": torch.sub,
    "clamp": torch.clamp,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "log": torch.log,
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
}
"""Steps on the values before them, element by element."""


@dataclass(frozen=True)
class Draw:
    """How one tensor gets its values. `name` keys the random numbers: tied names share it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]

    def whole(self, seed: int) -> Tensor:
        """The whole tensor."""
        return self.part(seed, [None] * len(self.shape))

    def part(self, seed: int, held: Sequence[Tensor | None]) -> Tensor:
        """The part with the indices `held[d]` of each dim (1-D int64; None: all of them).

        Takes the memory of the part and of one block of elements.
        """
        rows, columns = flat_indices(held, self.shape, torch.device("cpu"))
        shape = [
            length if indices is None else len(indices)
            for length, indices in zip(self.shape, held, strict=True)
        ]
        result = torch.empty(shape, dtype=self.dtype)
        if not result.numel():
            return result
        flat = result.view(len(rows), len(columns))
        keys = [_key(seed, self.name, number) for number in range(len(self.steps))]
        row_step = max(1, _BLOCK_ELEMENTS // len(columns))
        column_step = max(1, min(len(columns), _BLOCK_ELEMENTS))
        for row in range(0, len(rows), row_step):
            for column in range(0, len(columns), column_step):
                block = rows[row : row + row_step, None] + columns[column : column + column_step]
                values = self._values(keys, block)
                flat[row : row + row_step, column : column + column_step] = values
        return result

    def _values(self, keys: Sequence[int], indices: Tensor) -> Tensor:
        values = torch.empty(indices.shape, dtype=torch.float64)
        for key, step in zip(keys, self.steps, strict=True):
            if step.op in FILLS:
                new = FILLS[step.op](indices * GOLDEN + key, *step.args)
            else:
                new = CHANGES[step.op](values, *step.args)
            if (step.start, step.stop) == (0, math.prod(self.shape)):
                values = new
            else:
                values = torch.where((indices >= step.start) & (indices < step.stop), new, values)
        return values


def _key(seed: int, name: str, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}\0{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _uniform(keys: Tensor, stream: int) -> Tensor:
    """53 random bits over 2**53: in [0, 1). Streams of one element are independent."""
    bits = mix_(mix_(keys.clone()).add_(stream).mul_(GOLDEN))
    return ((bits >> 11).bitwise_and_((1 << 53) - 1)).double().mul_(2.0**-53)


def _normal(keys: Tensor) -> Tensor:
    """Standard normal, by Box and Muller (1958)."""
    radius = _uniform(keys, 1).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    return _uniform(keys, 2).mul_(2.0 * math.pi).cos_().mul_(radius)
