"""What the sample calls of ops are drawn from, and where they are registered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from msc.ir.torch_private import OpOverload
from msc.passes.sharding.rule import Call
from msc.testing.shards import call_of

T = TypeVar("T")

LENGTHS = (1, 2, 3, 4, 6, 12)
MAX_ELEMENTS = 600


@dataclass
class Draw:
    """Draws of one sample call: lengths that two and three ranks divide, and some that not.

    dtype: of all floating tensors of the call.
    """

    data: st.DataObject

    def __post_init__(self) -> None:
        self.dtype = self.pick([torch.float64] * 5 + [torch.float32])
        self._generator = torch.Generator().manual_seed(self.data.draw(st.integers(0, 1000)))

    def pick(self, choices: Sequence[T]) -> T:
        return self.data.draw(st.sampled_from(choices))

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def count(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def length(self) -> int:
        return self.pick(LENGTHS)

    def shape(self, low: int = 0, high: int = 4) -> list[int]:
        shape: list[int] = []
        for _ in range(self.count(low, high)):
            room = MAX_ELEMENTS // math.prod(shape)
            shape.append(self.pick([length for length in LENGTHS if length <= max(1, room)]))
        return shape

    def dim(self, shape: Sequence[int]) -> int:
        """A dim of a shape, counted from either end."""
        return self.count(-len(shape), len(shape) - 1)

    def dims(self, shape: Sequence[int], low: int = 1) -> list[int]:
        """Distinct dims of a shape, in any order."""
        chosen = self.data.draw(st.permutations(range(len(shape))))
        return [d - len(shape) if self.flag() else d for d in chosen[: self.count(low, len(shape))]]

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(list(shape), dtype=self.dtype, generator=self._generator)

    def unit(self, shape: Sequence[int]) -> torch.Tensor:
        """Between 0.1 and 0.9: in the domain of all functions."""
        return torch.rand(list(shape), dtype=self.dtype, generator=self._generator) * 0.8 + 0.1

    def integers(self, shape: Sequence[int], high: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, list(shape), generator=self._generator)

    def truths(self, shape: Sequence[int]) -> torch.Tensor:
        return self.integers(shape, 2).bool()

    def values(self, shape: Sequence[int]) -> torch.Tensor:
        """Floats, integers or truth values."""
        kind = self.pick(["float", "float", "int", "bool"])
        if kind == "float":
            return self.normal(shape)
        return self.integers(shape, 9) if kind == "int" else self.truths(shape)

    def broadcast(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to `shape`: some dims of length 1, some leading ones missing."""
        cut = self.count(0, len(shape)) if self.flag() else 0
        return [1 if self.count(0, 3) == 0 else length for length in shape[cut:]]


@dataclass(frozen=True)
class Sampler:
    """Draws calls of an op.

    constant: places of operands that take no gradient.
    uninitialized: the results' elements are arbitrary.
    """

    arguments: Callable[[Draw, OpOverload], tuple[Any, ...]]
    constant: tuple[int, ...] = ()
    uninitialized: bool = False

    def call(self, draw: Draw, op: OpOverload) -> Call:
        drawn = self.arguments(draw, op)
        if drawn and isinstance(drawn[-1], dict):
            return call_of(op, *drawn[:-1], **drawn[-1])
        return call_of(op, *drawn)


SAMPLERS: dict[OpOverload, Sampler] = {}

Arguments = Callable[[Draw, OpOverload], tuple[Any, ...]]


def samples(
    *ops: Any, constant: tuple[int, ...] = (), uninitialized: bool = False
) -> Callable[[Arguments], Arguments]:
    """Register a function that draws the arguments of ops.

    It is called with a `Draw` and the op; it returns the positional arguments, and, if the last
    item is a dict, keyword arguments. An op without overload (`aten.mm`) stands for its `default`.
    """

    def register(arguments: Arguments) -> Arguments:
        for op in ops:
            overload = op if isinstance(op, OpOverload) else op.default
            assert overload not in SAMPLERS, f"{overload} has two samplers"
            SAMPLERS[overload] = Sampler(arguments, constant, uninitialized)
        return arguments

    return register
