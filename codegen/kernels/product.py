"""The text of one tile of a matrix product: `acc[BM, BN] = x[rows, :] @ y[:, columns]`.

Two forms. With tensor descriptors the hardware moves whole tiles and fills what lies outside of the
tensor with zeros; that needs rows of a multiple of 16 bytes. With pointers every thread computes
addresses, and what lies outside is masked; masks are left out where the sizes need none.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.description import BYTES, SHORT, Argument, Target, Tiles
from msc.codegen.kernels.source import fill
from msc.ir.errors import PlanError

_INT32_LIMIT = 2**31
_SIDE_OF = {"mk": "m", "km": "m", "nk": "n", "kn": "n"}


@dataclass(frozen=True)
class Operand:
    """One factor of a product: contiguous, its dims in the order of `layout`.

    layout: "mk" or "km" for the left factor, "nk" or "kn" for the right one; k is contracted.
    shape: of the whole tensor, in that order.
    """

    name: str
    layout: str
    shape: tuple[int, int]
    dtype: str

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

    def block(self, tiles: Tiles) -> tuple[int, int]:
        """The block that one step loads, in the order of the layout."""
        own = tiles.m if self.side == "m" else tiles.n
        return (tiles.k, own) if self.depth_major else (own, tiles.k)

    def argument(self, tiles: Tiles, described: bool) -> Argument:
        """How the kernel takes it."""
        if described:
            return Argument(self.name, "descriptor", self.dtype, self.block(tiles))
        return Argument(self.name, "pointer", self.dtype)


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
    described: bool

    @property
    def dtype(self) -> str:
        """Of the factors; the sums are float32."""
        return self.left.dtype

    def zeros(self) -> str:
        """The accumulators before the first step."""
        return "\n".join(f"{name} = tl.zeros((BM, BN), dtype=tl.float32)" for name in self.accumulators)

    def steps(self, rows: Span, columns: tuple[Span, ...], depth: Span) -> str:
        """The loop over `depth` that adds to the accumulators."""
        if self.described:
            return self._described_steps(rows, columns, depth)
        return self._pointer_steps(rows, columns, depth)

    def _dot(self, accumulator: str, x: str, y: str) -> str:
        # float32 is multiplied as such: tensor cores would round it to 10 bits
        precision = ', input_precision="ieee"' if self.dtype == "float32" else ""
        return f"{accumulator} = tl.dot({x}, {y}, {accumulator}{precision})"

    def _described_steps(self, rows: Span, columns: tuple[Span, ...], depth: Span) -> str:
        body = [f"x = {_descriptor_load(self.left, rows.start)}"]
        x = "x.T" if self.left.depth_major else "x"
        for accumulator, right, span in zip(self.accumulators, self.rights, columns, strict=True):
            body.append(f"y = {_descriptor_load(right, span.start)}")
            body.append(self._dot(accumulator, x, "y" if right.depth_major else "y.T"))
        loop = f"for k in range({depth.start}, {depth.end}, BK):\n    <<body>>"
        return fill(loop, body="\n".join(body))

    def _pointer_steps(self, rows: Span, columns: tuple[Span, ...], depth: Span) -> str:
        setup = [f"rows = {rows.start} + tl.arange(0, BM)", "steps = tl.arange(0, BK)"]
        setup.append(f"depth = {depth.start} + steps")
        setup.append(f"x_at = {_addresses(self.left, 'rows[:, None]', 'depth[None, :]')}")
        inside = "" if depth.exact else f" & (steps[None, :] < {depth.end} - k)"
        mask = ("" if rows.exact else f" & (rows[:, None] < {rows.end})") + inside
        body = [f"x = tl.load(x_at{_masked(mask)})"]
        moves = [f"x_at += {_stride(self.left)}"]
        for i, (accumulator, right, span) in enumerate(
            zip(self.accumulators, self.rights, columns, strict=True)
        ):
            own = f"columns_{i}" if len(columns) > 1 else "columns"
            at = f"y_at_{i}" if len(columns) > 1 else "y_at"
            setup.append(f"{own} = {span.start} + tl.arange(0, BN)")
            setup.append(f"{at} = {_addresses(right, f'{own}[None, :]', 'depth[:, None]')}")
            inside = "" if depth.exact else f" & (steps[:, None] < {depth.end} - k)"
            mask = ("" if span.exact else f" & ({own}[None, :] < {span.end})") + inside
            body.append(f"y = tl.load({at}{_masked(mask)})")
            body.append(self._dot(accumulator, "x", "y"))
            moves.append(f"{at} += {_stride(right)}")
        text = """
            <<setup>>
            for k in range($start, $end, BK):
                <<body>>
        """
        return fill(
            text,
            setup="\n".join(setup),
            start=depth.start,
            end=depth.end,
            body="\n".join([*body, *moves]),
        )


def use_descriptors(target: Target, operands: tuple[Operand, ...]) -> bool:
    """Whether the target has descriptors and all tensors can be described."""
    return target.has_tensor_memory_accelerator and all(operand.aligned for operand in operands)


def element(dtype: str) -> str:
    """The dtype as it is named in a kernel: `tl.bfloat16`."""
    return f"tl.{dtype}"


def short(dtype: str) -> str:
    """The dtype as it is named in a kernel's name: `bf16`."""
    return SHORT[dtype]


def _descriptor_load(operand: Operand, start: str) -> str:
    indices = f"k, {start}" if operand.depth_major else f"{start}, k"
    return f"{operand.name}.load([{indices}])"


def _addresses(operand: Operand, own: str, depth: str) -> str:
    length = operand.shape[1]
    wide = operand.wide
    if operand.depth_major:
        return f"{operand.name} + {depth}{wide} * {length} + {own}"
    return f"{operand.name} + {own}{wide} * {length} + {depth}"


def _stride(operand: Operand) -> str:
    return f"BK * {operand.shape[1]}" if operand.depth_major else "BK"


def _masked(mask: str) -> str:
    return f", mask={mask.removeprefix(' & ')}, other=0.0" if mask else ""
