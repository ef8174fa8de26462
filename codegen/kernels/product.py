"""The text of one tile of a matrix product: `acc[BM, BN] = x[rows, :] @ y[:, columns]`.

Two forms. With tensor descriptors the hardware moves whole tiles and fills what lies outside of the
tensor with zeros; that needs rows of a multiple of 16 bytes. With pointers every thread computes
addresses, and what lies outside is masked; masks are left out where the sizes need none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msc.codegen.kernels.description import Argument, Target, Tiles
from msc.codegen.kernels.dtypes import BYTES
from msc.codegen.kernels.source import fill, masked, precision, wide_index
from msc.ir.errors import PlanError

_SIDE_OF = {"mk": "m", "km": "m", "nk": "n", "kn": "n"}


@dataclass(frozen=True)
class Operand:
    """One factor of a product: contiguous, its dims in the order of `layout`.

    layout: "mk" or "km" for the left factor, "nk" or "kn" for the right one; k is contracted.
    shape: of the whole tensor, in that order. described: moved by a tensor descriptor. stride: the
    length of a row as text, where it is no constant.
    """

    name: str
    layout: str
    shape: tuple[int, int]
    dtype: str
    described: bool = False
    stride: str = ""

    def __post_init__(self) -> None:
        if self.layout not in _SIDE_OF:
            raise PlanError(f"{self.name}: no layout {self.layout!r}, but {list(_SIDE_OF)}")

    @property
    def side(self) -> str:
        """The dim that is not contracted: "m" or "n"."""
        return _SIDE_OF[self.layout]

    @property
    def depth_major(self) -> bool:
        """Whether the contracted dim comes first in memory."""
        return self.layout[0] == "k"

    @property
    def aligned(self) -> bool:
        """Whether a descriptor can move it: rows of a multiple of 16 bytes."""
        return self.shape[1] * BYTES[self.dtype] % 16 == 0

    @property
    def wide(self) -> str:
        """The conversion of its row index."""
        return wide_index(self.shape[0] * self.shape[1])

    @property
    def length(self) -> str:
        """Elements of a row, as text."""
        return self.stride or str(self.shape[1])

    def argument(self, tiles: Tiles) -> Argument:
        """How the kernel takes it."""
        if not self.described:
            return Argument(self.name, "pointer", self.dtype)
        own = tiles.m if self.side == "m" else tiles.n
        block = (tiles.k, own) if self.depth_major else (own, tiles.k)
        return Argument(self.name, "descriptor", self.dtype, block)


@dataclass(frozen=True)
class Span:
    """A run of indices as text, and whether it is cut into whole blocks."""

    start: str
    end: str
    exact: bool


@dataclass(frozen=True)
class Product:
    """How the text of a tile is made; with two accumulators, of two runs of the right's columns.

    second: the right factor of the second accumulator, where it is another one. The sums are
    float32.
    """

    left: Operand
    right: Operand
    accumulators: tuple[str, ...] = ("acc",)
    second: Operand | None = None

    def zeros(self) -> str:
        """The accumulators before the first step."""
        return "\n".join(
            f"{name} = tl.zeros((BM, BN), dtype=tl.float32)" for name in self.accumulators
        )

    def steps(self, rows: Span, columns: tuple[Span, ...], depth: Span) -> str:
        """The loop over `depth` that adds to the accumulators, each of its columns."""
        setup: list[str] = []
        moves: list[str] = []
        if not (self.left.described and self.right.described):
            setup += ["steps = tl.arange(0, BK)", f"depth = {depth.start} + steps"]
        x = _Reader(self.left, "left", "rows", rows, depth)
        numbers = ("",) if len(columns) == 1 else ("_0", "_1")
        rights = (self.right, self.second or self.right)[: len(columns)]
        ys = [
            _Reader(operand, f"right{number}", f"columns{number}", span, depth)
            for operand, number, span in zip(rights, numbers, columns, strict=True)
        ]
        for reader in (x, *ys):
            setup += reader.setup
            moves += reader.moves
        body = [x.load]
        rest = precision(self.left.dtype)
        for acc, y in zip(self.accumulators, ys, strict=True):
            body += [y.load, f"{acc} = tl.dot({x.value}, {y.value}, {acc}{rest})"]
        text = """
            <<setup>>
            for k in range($start, $end, BK):
                <<body>>
        """
        lines = "\n".join([*body, *moves])
        return fill(text, setup="\n".join(setup), start=depth.start, end=depth.end, body=lines)


class _Reader:
    """The text that loads one factor's block in each step: before the loop, in it, at its end.

    `value` is the block as `tl.dot` wants it, [BM, BK] or [BK, BN].
    """

    def __init__(self, operand: Operand, name: str, indices: str, own: Span, depth: Span) -> None:
        self.setup: list[str] = []
        self.moves: list[str] = []
        left = operand.side == "m"
        if operand.described:
            at = f"k, {own.start}" if operand.depth_major else f"{own.start}, k"
            self.load = f"{name} = {operand.name}.load([{at}])"
            self.value = name if operand.depth_major != left else f"{name}.T"
            return
        self.value = name
        size = "BM" if left else "BN"
        own_axis, depth_axis = ("[:, None]", "[None, :]") if left else ("[None, :]", "[:, None]")
        along, across = f"{indices}{own_axis}", f"depth{depth_axis}"
        major, minor = (across, along) if operand.depth_major else (along, across)
        self.setup = [
            f"{indices} = {own.start} + tl.arange(0, {size})",
            f"{name}_at = {operand.name} + {major}{operand.wide} * {operand.length} + {minor}",
        ]
        mask = masked(
            "" if own.exact else f"({along} < {own.end})",
            "" if depth.exact else f"(steps{depth_axis} < {depth.end} - k)",
            other="0.0",
        )
        self.load = f"{name} = tl.load({name}_at{mask})"
        step = f"BK * {operand.length}" if operand.depth_major else "BK"
        self.moves = [f"{name}_at += {step}"]


def use_descriptors(target: Target, operands: tuple[Operand, ...]) -> bool:
    """Whether the target has descriptors and all tensors can be described."""
    return target.has_tensor_memory_accelerator and all(operand.aligned for operand in operands)


def described(operand: Operand) -> Operand:
    """The same operand, moved by a tensor descriptor."""
    return replace(operand, described=True)
