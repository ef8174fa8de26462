"""The text of one tile of a matrix product: `acc[BM, BN] = x[rows, :] @ y[:, columns]`.

Two forms. With tensor descriptors the hardware moves whole tiles and fills what lies outside of the
tensor with zeros; that needs rows of a multiple of 16 bytes. With pointers every thread computes
addresses, and what lies outside is masked; masks are left out where the sizes need none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msc.codegen.kernels.description import BYTES, SHORT, Argument, Target, Tiles
from msc.codegen.kernels.source import fill
from msc.ir.errors import PlanError

_INT32_LIMIT = 2**31
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
        """The conversion of its row index, so that offsets beyond 2^31 do not wrap around."""
        return ".to(tl.int64)" if self.shape[0] * self.shape[1] >= _INT32_LIMIT else ""

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
    """How the text of a tile is made: one left factor, one or two right ones (gate and up)."""

    left: Operand
    rights: tuple[Operand, ...]
    accumulators: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """Of the factors; the sums are float32."""
        return self.left.dtype

    def zeros(self) -> str:
        """The accumulators before the first step."""
        return "\n".join(
            f"{name} = tl.zeros((BM, BN), dtype=tl.float32)" for name in self.accumulators
        )

    def steps(self, rows: Span, columns: tuple[Span, ...], depth: Span) -> str:
        """The loop over `depth` that adds to the accumulators."""
        setup: list[str] = []
        body: list[str] = []
        moves: list[str] = []
        operands = (self.left, *self.rights)
        if not all(operand.described for operand in operands):
            setup += ["steps = tl.arange(0, BK)", f"depth = {depth.start} + steps"]
        x = _Reader(self.left, "left", "rows", rows, depth)
        numbers = ("",) if len(columns) == 1 else ("_0", "_1")
        ys = [
            _Reader(right, f"right{number}", f"columns{number}", span, depth)
            for number, right, span in zip(numbers, self.rights, columns, strict=True)
        ]
        for reader in (x, *ys):
            setup += reader.setup
            moves += reader.moves
        body += x.load
        for accumulator, y in zip(self.accumulators, ys, strict=True):
            body += y.load
            body.append(self._dot(accumulator, x.value, y.value))
        text = """
            <<setup>>
            for k in range($start, $end, BK):
                <<body>>
        """
        lines = "\n".join([*body, *moves])
        return fill(text, setup="\n".join(setup), start=depth.start, end=depth.end, body=lines)

    def _dot(self, accumulator: str, x: str, y: str) -> str:
        # float32 is multiplied as such: tensor cores would round it to 10 bits
        precision = ', input_precision="ieee"' if self.dtype == "float32" else ""
        return f"{accumulator} = tl.dot({x}, {y}, {accumulator}{precision})"


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
            self.load = [f"{name} = {operand.name}.load([{at}])"]
            self.value = name if operand.depth_major != left else f"{name}.T"
            return
        self.value = name
        along, across = (
            (f"{indices}[:, None]", "[None, :]")
            if left
            else (
                f"{indices}[None, :]",
                "[:, None]",
            )
        )
        size = "BM" if left else "BN"
        major, minor = (
            (f"depth{across}", along)
            if operand.depth_major
            else (
                along,
                f"depth{across}",
            )
        )
        self.setup = [
            f"{indices} = {own.start} + tl.arange(0, {size})",
            f"{name}_at = {operand.name} + {major}{operand.wide} * {operand.length} + {minor}",
        ]
        masks = [
            "" if own.exact else f"({along} < {own.end})",
            "" if depth.exact else f"(steps{across} < {depth.end} - k)",
        ]
        mask = " & ".join(filter(None, masks))
        masked = f", mask={mask}, other=0.0" if mask else ""
        self.load = [f"{name} = tl.load({name}_at{masked})"]
        self.moves = [
            f"{name}_at += " + (f"BK * {operand.length}" if operand.depth_major else "BK")
        ]


def use_descriptors(target: Target, operands: tuple[Operand, ...]) -> bool:
    """Whether the target has descriptors and all tensors can be described."""
    return target.has_tensor_memory_accelerator and all(operand.aligned for operand in operands)


def described(operand: Operand) -> Operand:
    """The same operand, moved by a tensor descriptor."""
    return replace(operand, described=True)


def element(dtype: str) -> str:
    """The dtype as it is named in a kernel: `tl.bfloat16`."""
    return f"tl.{dtype}"


def short(dtype: str) -> str:
    """The dtype as it is named in a kernel's name: `bf16`."""
    return SHORT[dtype]
