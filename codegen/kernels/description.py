"""What describes an emitted kernel: its target, its arguments, its text and how it is launched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A kind of device. `shared_limit`: bytes of shared memory that one program may use.

    interpreted: kernels run in Triton's interpreter on the CPU, where few large tiles are fastest.
    """

    name: str
    capability: int
    shared_limit: int
    processors: int
    interpreted: bool = False

    @property
    def has_tensor_memory_accelerator(self) -> bool:
        """Whether loads and stores of whole tiles go through tensor descriptors."""
        return self.capability >= 90


SM_80 = Target("sm_80", 80, 166_912, 108)
SM_90 = Target("sm_90", 90, 232_448, 132)
TARGETS = (SM_80, SM_90)
INTERPRETER = Target("interpreter", 80, 166_912, 2, interpreted=True)


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: a program makes `m` by `n` elements in steps of `k`.

    group: rows of tiles that are made column after column, so that they share loads in L2.
    parts: pieces in which the epilogue stores a tile; two of them need half the shared memory.
    """

    m: int
    n: int
    k: int
    group: int = 8
    warps: int = 8
    stages: int = 3
    parts: int = 1

    def __str__(self) -> str:
        return (
            f"{self.m}x{self.n}x{self.k} g{self.group} w{self.warps} s{self.stages} p{self.parts}"
        )

    @classmethod
    def parse(cls, text: str) -> Tiles:
        """The tiles that `str` wrote; `ValueError` for other text."""
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+) g(\d+) w(\d+) s(\d+) p(\d+)", text)
        if found is None:
            raise ValueError(f"{text!r} names no tiles")
        return cls(*map(int, found.groups()))

    @property
    def constants(self) -> dict[str, int]:
        """The named constants of every tiled product."""
        return {"BM": self.m, "BN": self.n, "BK": self.k, "GROUP": self.group}


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel.

    kind: "pointer" to elements of `dtype`; "descriptor" of a contiguous 2-D tensor, moved in
    `block`s; "table" of int64 addresses; or a number, "int32" or "int64", whose value no kernel is
    specialized for.
    """

    name: str
    kind: str
    dtype: str = ""
    block: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """An emitted kernel.

    source: the text of a Python module whose function `entry` is the kernel. grid: programs per
    dim. matrix: its work is products of matrices, which belong on tensor cores.
    """

    name: str
    source: str
    entry: str
    arguments: tuple[Argument, ...]
    grid: tuple[int, ...]
    target: Target
    warps: int
    stages: int
    matrix: bool = False

    def pick(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Of values by name those that are its arguments."""
        return {argument.name: values[argument.name] for argument in self.arguments}

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told besides the arguments, to compile it or to launch it."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def signature(arguments: Iterable[Argument]) -> str:
    """The names of the arguments, as they stand in the kernel's definition."""
    return ", ".join(argument.name for argument in arguments)


def ceil_div(value: int, by: int) -> int:
    """The number of pieces of at most `by` that `value` is cut into."""
    return -(-value // by)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`: blocks of Triton have such sizes."""
    return 1 << (value - 1).bit_length()
