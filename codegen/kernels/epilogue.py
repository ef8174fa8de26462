"""What a product does with a finished tile: bias, activation, residual, and the store.

    y = activation(x @ w.T + bias) + residual

"swiglu" and its kin multiply two products: `silu(x @ gate.T) * (x @ up.T)`, where gate and up are
the two halves of one weight's rows, or two weights (Shazeer, "GLU variants improve transformer",
2020).
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.description import Argument, Tiles
from msc.codegen.kernels.product import Span
from msc.ir.errors import PlanError

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""What is applied to the first of two products, by the name of the activation of both."""

ACTIVATIONS = ("", *GATED.values(), *GATED)


@dataclass(frozen=True)
class Epilogue:
    """bias: one number per column. residual: a tensor of the result's shape.

    keep: also store the value before the activation, which its backward reads (for "swiglu" both
    products, side by side). apart: gate and up are two weights, and what is kept two tensors.
    """

    bias: bool = False
    activation: str = ""
    residual: bool = False
    keep: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise PlanError(f"no activation {self.activation!r} in an epilogue; {ACTIVATIONS[1:]}")
        if self.gated and self.bias:
            raise PlanError(
                f"an epilogue with {self.activation} has no bias: neither Llama nor PaLM has one"
            )
        if self.apart and not self.gated:
            raise PlanError("an epilogue has two weights only where one gates the other")
        if self.keep and not self.activation:
            raise PlanError("an epilogue keeps what its activation reads, and it has none")

    def arguments(self, dtype: str) -> tuple[Argument, ...]:
        """The tensors that it reads and writes besides the result."""
        names = [(self.bias, "bias"), (self.residual, "residual"), (self.keep, "kept")]
        names.append((self.keep and self.apart, "kept_up"))
        return tuple(Argument(name, "pointer", dtype) for wanted, name in names if wanted)

    @property
    def gated(self) -> bool:
        """Whether two products are multiplied."""
        return self.activation in GATED

    @property
    def accumulators(self) -> tuple[str, ...]:
        """The products it reads."""
        return ("acc", "acc_up") if self.gated else ("acc",)

    def right_columns(self, columns: Span) -> tuple[Span, ...]:
        """The columns of the right factor that each product reads: the gate's, then those of up."""
        below = Span(f"N + {columns.start}", "2 * N", columns.exact)
        up = columns if self.apart else below
        return (columns, up)[: len(self.accumulators)]

    @property
    def label(self) -> str:
        """Its part of a kernel's name."""
        parts = (
            "bias" * self.bias,
            self.activation,
            "residual" * self.residual,
            "keep" * self.keep,
            "apart" * self.apart,
        )
        return "".join(f"_{part}" for part in parts if part)


@dataclass(frozen=True)
class Store:
    """Where a finished tile goes: a contiguous [rows, width] tensor, by descriptor or pointers.

    width: as text.
    """

    name: str
    width: str
    dtype: str
    described: bool
    wide: str = ""

    def argument(self, tiles: Tiles) -> Argument:
        """How the kernel takes the tensor."""
        if not self.described:
            return Argument(self.name, "pointer", self.dtype)
        return Argument(self.name, "descriptor", self.dtype, (tiles.m, tiles.n // tiles.parts))


def store_tile(epilogue: Epilogue, store: Store, rows: Span, columns: Span, parts: int) -> str:
    """The text from accumulator(s) to memory.

    With two parts, the tile is taken apart by columns, so that staging it takes half the shared
    memory; what it takes is then the size of one half.
    """
    names = list(epilogue.accumulators)
    if parts == 1:
        return _one_part(epilogue, store, rows, columns, names, "BN")
    text: list[str] = []
    halves: list[list[str]] = [[], []]
    for name in names:
        pair = [f"{name}_left", f"{name}_right"]
        text.append(f"{', '.join(pair)} = {name}.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()")
        for half, part in zip(halves, pair, strict=True):
            half.append(part)
    for half, start in zip(halves, (columns.start, f"{columns.start} + BN // 2"), strict=True):
        span = Span(start, columns.end, columns.exact)
        text.append(_one_part(epilogue, store, rows, span, half, "BN // 2"))
    return "\n".join(text)


def _one_part(
    epilogue: Epilogue,
    store: Store,
    rows: Span,
    columns: Span,
    values: list[str],
    width: str,
) -> str:
    value = values[0]
    lines: list[str] = []
    addressed = not store.described or epilogue.residual or epilogue.keep
    if addressed or epilogue.bias:
        lines.append(f"out_columns = {columns.start} + tl.arange(0, {width})")
    masks = [
        "" if rows.exact else f"(out_rows[:, None] < {rows.end})",
        "" if columns.exact else f"(out_columns[None, :] < {columns.end})",
    ]
    mask = " & ".join(filter(None, masks))
    masked = ", mask=inside" if mask else ""
    if addressed:
        lines.append(f"out_rows = {rows.start} + tl.arange(0, BM)")
        lines.append(f"at = out_rows[:, None]{store.wide} * {store.width} + out_columns[None, :]")
        if mask:
            lines.append(f"inside = {mask}")
    if epilogue.bias:
        there = "" if columns.exact else f", mask=out_columns < {columns.end}, other=0.0"
        lines.append(f"shift = tl.load(bias + out_columns{there}).to(tl.float32)")
        lines.append(f"{value} += shift[None, :]")
    if epilogue.keep:
        lines.extend(_keep(epilogue, store, values, masked))
    lines.extend(_activation(epilogue.activation, values))
    if epilogue.residual:
        other = f"{masked}, other=0.0" if masked else ""
        lines.append(f"{value} += tl.load(residual + at{other}).to(tl.float32)")
    rounded = f"{value}.to(tl.{store.dtype})"
    if store.described:
        lines.append(f"{store.name}.store([{rows.start}, {columns.start}], {rounded})")
    else:
        lines.append(f"tl.store({store.name} + at, {rounded}{masked})")
    return "\n".join(lines)


def _keep(epilogue: Epilogue, store: Store, values: list[str], masked: str) -> list[str]:
    dtype = f"tl.{store.dtype}"
    first = f"tl.store(kept + at, {values[0]}.to({dtype}){masked})"
    if not epilogue.gated:
        return [first]
    if epilogue.apart:
        return [first, f"tl.store(kept_up + at, {values[1]}.to({dtype}){masked})"]
    twice = f"2 * {store.width}"
    return [
        f"kept_at = out_rows[:, None]{store.wide} * ({twice}) + out_columns[None, :]",
        f"tl.store(kept + kept_at, {values[0]}.to({dtype}){masked})",
        f"tl.store(kept + kept_at + {store.width}, {values[1]}.to({dtype}){masked})",
    ]


def _activation(name: str, values: list[str]) -> list[str]:
    if not name:
        return []
    value = values[0]
    gate = f" * {values[1]}" if name in GATED else ""
    return [f"{value} = {activated(GATED.get(name, name), value)}{gate}"]


def activated(name: str, value: str) -> str:
    """The text of an activation of float32 values; it may stand before a product."""
    if name == "relu":  # a comparison that leaves NaN what it is
        return f"tl.where({value} < 0.0, 0.0, {value})"
    if name == "gelu":
        return f"0.5 * {value} * (1.0 + tl.erf({value} * {2**-0.5!r}))"
    if name == "gelu_tanh":
        # tanh(z) = 2 sigmoid(2 z) - 1, and sqrt(2 / pi) = 0.79788...
        cubed = f"{value} + 0.044715 * {value} * {value} * {value}"
        return f"{value} * tl.sigmoid(1.5957691216057308 * ({cubed}))"
    return f"{value} * tl.sigmoid({value})"
