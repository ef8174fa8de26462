"""LayerNorm and RMSNorm, forward and backward, with the residual sum before them.

A program works through whole rows. The gradients of weight and bias are sums over rows: each
program adds up those of its rows in float32, and `column_sums.py` adds up the programs in a fixed
order. Where a row is so wide that those sums would not stay in registers beside it, they are a
kernel of their own, which reads both operands once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.description import (
    Argument,
    Kernel,
    Target,
    ceil_div,
    power_of_two,
    signature,
)
from msc.codegen.kernels.dtypes import check_dtype, short
from msc.codegen.kernels.source import fill, module, wide_index
from msc.ir.errors import PlanError

WIDEST = 2**16
WIDEST_WITH_SUMS = 4096
PROGRAMS_PER_PROCESSOR = 4

FORWARD = """
@triton.jit
def norm_forward($arguments):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    for row in range(tl.program_id(0), ROWS, PROGRAMS):
        at = $row * WIDTH + columns
        value = tl.load(x + at, mask=inside, other=0.0)
        <<residual>>
        value = value.to(tl.float32)
        <<center>>
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + EPS)
        tl.store(rstd + row, scale)
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        result = value * scale * gain
        <<shift>>
        tl.store(y + at, result.to(tl.$dtype), mask=inside)
"""

RESIDUAL = """
# rounded as it is kept: what follows must not depend on whether the sum is fused
value = (value.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0)).to(tl.$dtype)
tl.store(summed + at, value, mask=inside)
"""

CENTER = """
center = tl.sum(value, axis=0) / WIDTH
value = tl.where(inside, value - center, 0.0)
tl.store(mean + row, center)
"""

BACKWARD = """
@triton.jit
def norm_backward($arguments):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    <<zeros>>
    for row in range(tl.program_id(0), ROWS, PROGRAMS):
        at = $row * WIDTH + columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gy + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)$wide
        <<center>>
        value = value * scale
        slope = gradient * gain
        <<sums>>
        along = tl.sum(slope * value, axis=0) / WIDTH
        <<slope>>
        result = (slope - value * along) * scale
        <<residual>>
        tl.store(dx + at, result.to(tl.$dtype), mask=inside)
    <<store>>
"""

WEIGHT = """
@triton.jit
def norm_weight_gradient($arguments):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    <<zeros>>
    for row in range(tl.program_id(1), ROWS, PROGRAMS):
        at = $row * WIDTH + columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gy + at, mask=inside, other=0.0).to(tl.float32)
        <<center>>
        value = value * tl.load(rstd + row)$wide
        <<sums>>
    <<store>>
"""

_CENTER_AGAIN = "value = tl.where(inside, value - tl.load(mean + row), 0.0)"


@dataclass(frozen=True)
class Norm:
    """y = (x - mean) / sqrt(var + eps) * weight + bias of each row; "rms" has no mean and no bias.

    x, y: [rows, width] of dtype; weight, bias: [width] of dtype; mean, rstd: [rows] of
    `statistics`, computed in float32. shift: whether a "layer" has a bias.
    residual: what is normalized is `summed` = x + residual, which is stored too; in the backward,
    its other gradient is added to dx. Gradients of weight and bias: float32 [programs, width].
    """

    kind: str
    rows: int
    width: int
    dtype: str
    target: Target
    eps: float = 1e-5
    residual: bool = False
    shift: bool = True
    statistics: str = "float32"

    def __post_init__(self) -> None:
        check_dtype("norm", self.dtype)
        if self.kind not in ("layer", "rms"):
            raise PlanError(f"a norm is 'layer' or 'rms', not {self.kind!r}")
        if self.width > WIDEST:
            raise PlanError(f"norm: kernels take rows of up to {WIDEST} elements, not {self.width}")

    @property
    def layer(self) -> bool:
        """Whether it has a mean."""
        return self.kind == "layer"

    @property
    def shifted(self) -> bool:
        """Whether it has a bias."""
        return self.layer and self.shift

    @property
    def label(self) -> str:
        """Its part of a kernel's name."""
        residual = "_residual" * self.residual + "_unshifted" * (self.layer and not self.shift)
        return f"{self.kind}{residual}_{self.rows}x{self.width}_{short(self.dtype)}"

    @property
    def block(self) -> int:
        """The power of two that holds a row."""
        return max(16, power_of_two(self.width))

    @property
    def warps(self) -> int:
        """So many that a thread holds about 16 elements."""
        return min(32, max(1, self.block // 512))

    @property
    def programs(self) -> int:
        """Programs of forward and backward, and rows of the partial sums."""
        return min(self.rows, self.target.processors * PROGRAMS_PER_PROCESSOR)

    @property
    def sums_in_backward(self) -> bool:
        """Whether the backward also sums the gradients of weight and bias."""
        return self.width <= WIDEST_WITH_SUMS


def emit_forward(norm: Norm) -> Kernel:
    """x [, residual], weight [, bias] -> y [, summed] [, mean], rstd."""
    names = ["x", *["residual"] * norm.residual, "weight", *["bias"] * norm.shifted, "y"]
    names += ["summed"] * norm.residual
    arguments = _arguments(norm, names, [])
    text = fill(
        FORWARD,
        arguments=signature(arguments),
        row=_row(norm),
        dtype=norm.dtype,
        residual=fill(RESIDUAL, dtype=norm.dtype) if norm.residual else "",
        center=CENTER if norm.layer else "",
        shift="result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)"
        if norm.shifted
        else "",
    )
    return _kernel(norm, "norm_forward", text, arguments)


def emit_backward(norm: Norm) -> Kernel:
    """gy, x (or summed), weight, statistics [, gradient of summed] -> dx [, partial sums]."""
    sums = _sums(norm) if norm.sums_in_backward else []
    names = ["gy", "x", "weight", *["g_summed"] * norm.residual, "dx"]
    arguments = _arguments(norm, names, sums)
    text = fill(
        BACKWARD,
        arguments=signature(arguments),
        row=_row(norm),
        wide=_wide(norm),
        dtype=norm.dtype,
        zeros=_zeros(sums),
        center=_CENTER_AGAIN if norm.layer else "",
        sums=_adds(sums),
        slope="slope = slope - tl.sum(slope, axis=0) / WIDTH" if norm.layer else "",
        residual="result += tl.load(g_summed + at, mask=inside, other=0.0)"
        if norm.residual
        else "",
        store=_stores(sums, "tl.program_id(0)"),
    )
    return _kernel(norm, "norm_backward", text, arguments)


def emit_weight_gradient(norm: Norm) -> Kernel:
    """gy, x (or summed), statistics -> partial sums; for rows whose backward does not make them."""
    sums = _sums(norm)
    arguments = _arguments(norm, ["gy", "x"], sums)
    block = min(1024, norm.block)
    text = fill(
        WEIGHT,
        arguments=signature(arguments),
        row=_row(norm),
        wide=_wide(norm),
        zeros=_zeros(sums),
        center=_CENTER_AGAIN if norm.layer else "",
        sums=_adds(sums),
        store=_stores(sums, "tl.program_id(1)"),
    )
    grid = (ceil_div(norm.width, block), norm.programs)
    return _kernel(norm, "norm_weight_gradient", text, arguments, grid, block)


def _sums(norm: Norm) -> list[str]:
    return ["dw_parts", *["db_parts"] * norm.shifted]


def _wide(norm: Norm) -> str:
    return "" if norm.statistics == "float32" else ".to(tl.float32)"


def _zeros(sums: list[str]) -> str:
    return "\n".join(f"{name[:2]} = tl.zeros((BLOCK,), tl.float32)" for name in sums)


def _adds(sums: list[str]) -> str:
    terms = {"dw_parts": "dw += gradient * value", "db_parts": "db += gradient"}
    return "\n".join(terms[name] for name in sums)


def _stores(sums: list[str], program: str) -> str:
    at = f"{program} * WIDTH + columns"
    return "\n".join(f"tl.store({name} + {at}, {name[:2]}, mask=inside)" for name in sums)


def _row(norm: Norm) -> str:
    return f"row{wide_index(norm.rows * norm.width)}"


def _arguments(norm: Norm, names: list[str], sums: list[str]) -> tuple[Argument, ...]:
    """Tensors of the norm's dtype, its statistics, and partial sums."""
    statistics = [*["mean"] * norm.layer, "rstd"]
    return (
        *(Argument(name, "pointer", norm.dtype) for name in names),
        *(Argument(name, "pointer", norm.statistics) for name in statistics),
        *(Argument(name, "pointer", "float32") for name in sums),
    )


def _kernel(
    norm: Norm,
    entry: str,
    text: str,
    arguments: tuple[Argument, ...],
    grid: tuple[int, ...] = (),
    block: int = 0,
) -> Kernel:
    constants: dict[str, int | float] = {
        "ROWS": norm.rows,
        "WIDTH": norm.width,
        "BLOCK": block or norm.block,
        "PROGRAMS": norm.programs,
    }
    if entry == "norm_forward":
        constants["EPS"] = norm.eps
    return Kernel(
        f"{entry}_{norm.label}",
        module(f"{norm.kind} norm of [{norm.rows}, {norm.width}].", constants, text),
        entry,
        arguments,
        grid or (norm.programs,),
        norm.target,
        min(8, norm.warps) if block else norm.warps,
        1,
    )
