"""A linear head and its cross entropy in one: the logits are never in memory.

The forward keeps of each tile of logits a maximum and a sum of exponentials per row, and the
target's logit; a second kernel combines the tiles in their order. The backward makes the tiles
again, and writes gradients of logits for as many columns as its caller has memory for: the input
gradient and the weight gradient are ordinary products of those (Wijmans et al., "Cut your losses in
large-vocabulary language models", ICLR 2025; Hsu et al., "Liger kernel", 2024). With a part of the
vocabulary, ranks combine the terms as those of `cross_entropy.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels import tile_order
from msc.codegen.kernels.description import Argument, Kernel, Target, Tiles, ceil_div, signature
from msc.codegen.kernels.dtypes import check_dtype, on_tensor_cores, short
from msc.codegen.kernels.product import Operand, Product, Span, described, use_descriptors
from msc.codegen.kernels.source import fill, masked, module

BLOCK = 128

KERNEL = """
@triton.jit(do_not_specialize=["start"])
def $name($arguments):
    for tile in range(tl.program_id(0), TILES_M * TILES_N, PROGRAMS):
        tile_m, tile_n = tile_at(tile)
        row = tile_m * BM
        column = tile_n * BN
        <<zeros>>
        <<steps>>
        out_rows = row + tl.arange(0, BM)
        out_columns = column + tl.arange(0, BN)
        <<cap>>
        wanted = tl.load(target + out_rows, mask=out_rows < M, other=-1) - start
        hit = out_columns[None, :] == wanted[:, None]
        <<finish>>
"""

# tanh(z) = 2 sigmoid(2 z) - 1
CAP = """
bounded = 2.0 * tl.sigmoid(acc * (2.0 / SOFT_CAP)) - 1.0
acc = bounded * SOFT_CAP
"""

TERMS = """
<<hide>>
peak = tl.max(acc, axis=1)
at = tile_n * M + out_rows
tl.store(highest + at, peak, mask=out_rows < M)
tl.store(total + at, tl.sum(tl.exp(acc - peak[:, None]), axis=1), mask=out_rows < M)
here = (wanted >= column) & (wanted < column + BN) & (wanted < N) & (out_rows < M)
found = tl.sum(tl.where(hit, acc, 0.0), axis=1)
tl.store(target_logit + out_rows, found.to(tl.float64), mask=here)
"""

GRADIENT = """
level = tl.load(lse + out_rows, mask=out_rows < M, other=0.0).to(tl.float32)
weight = tl.load(g_lse + out_rows, mask=out_rows < M, other=0.0).to(tl.float32)
extra = tl.load(g_target + out_rows, mask=out_rows < M, other=0.0).to(tl.float32)
acc = tl.exp(acc - level[:, None]) * weight[:, None]
acc = tl.where(hit, acc + extra[:, None], acc)
<<slope>>
at = out_rows[:, None]$wide * N + out_columns[None, :]
tl.store(gradient + at, acc.to(tl.$dtype)$mask)
"""

COMBINE = """
@triton.jit(do_not_specialize=["start"])
def linear_cross_entropy_combine(highest, total, target, lse, target_logit, start):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < M
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for tile in range(TILES_N):
        value = tl.load(highest + tile * M + rows, mask=inside, other=0.0)
        own = tl.load(total + tile * M + rows, mask=inside, other=0.0)
        higher = tl.maximum(peak, value)
        sums = sums * tl.exp(peak - higher) + own * tl.exp(value - higher)
        peak = higher
    # their difference is the loss: float32 would leave few digits of a small one
    tl.store(lse + rows, tl.log(sums.to(tl.float64)) + peak.to(tl.float64), mask=inside)
    wanted = tl.load(target + rows, mask=inside, other=0) - start
    elsewhere = inside & ((wanted < 0) | (wanted >= N))
    tl.store(target_logit + rows, tl.zeros((BLOCK,), tl.float64), mask=elsewhere)
"""


@dataclass(frozen=True)
class LinearCrossEntropy:
    """x [m, k] and w [n, k] of dtype: rows of activations, and this rank's rows of the head.

    w has the rows `start ... start + n` of the vocabulary. target: int64 [m]; one outside of them,
    such as -100, has target logit 0. lse, target_logit and their gradients: float64 [m]. With
    soft_cap c > 0 a logit l is c tanh(l / c).
    """

    m: int
    n: int
    k: int
    dtype: str
    target: Target
    tiles: Tiles
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        check_dtype("linear + cross entropy", self.dtype)

    @property
    def label(self) -> str:
        """Its part of a kernel's name."""
        capped = "capped_" if self.soft_cap else ""
        return f"{capped}{self.m}x{self.n}x{self.k}_{short(self.dtype)}"

    @property
    def columns(self) -> int:
        """Tiles of a row of logits."""
        return ceil_div(self.n, self.tiles.n)


def emit_terms(loss: LinearCrossEntropy) -> Kernel:
    """x, w, target, start -> highest, total: float32 [columns, m]; target_logit if it is here."""
    exact = loss.n % loss.tiles.n == 0
    hidden = 'acc = tl.where(out_columns[None, :] < N, acc, float("-inf"))'
    rest = (
        Argument("highest", "pointer", "float32"),
        Argument("total", "pointer", "float32"),
        Argument("target_logit", "pointer", "float64"),
    )
    finish = fill(TERMS, hide="" if exact else hidden)
    return _product(loss, "linear_cross_entropy_terms", finish, rest)


def emit_combine(loss: LinearCrossEntropy) -> Kernel:
    """highest, total, target, start -> lse; target_logit becomes 0 where the target is not here."""
    constants = {"M": loss.m, "N": loss.n, "TILES_N": loss.columns, "BLOCK": BLOCK}
    return Kernel(
        f"linear_cross_entropy_combine_{loss.label}",
        module("Terms of cross entropy from those of tiles.", constants, COMBINE),
        "linear_cross_entropy_combine",
        (
            Argument("highest", "pointer", "float32"),
            Argument("total", "pointer", "float32"),
            Argument("target", "pointer", "int64"),
            Argument("lse", "pointer", "float64"),
            Argument("target_logit", "pointer", "float64"),
            Argument("start", "int64"),
        ),
        (ceil_div(loss.m, BLOCK),),
        loss.target,
        4,
        2,
    )


def emit_gradient(loss: LinearCrossEntropy) -> Kernel:
    """x, w, target, lse, g_lse, g_target, start -> gradient [m, n] of the logits of these rows."""
    mask = masked(
        "" if loss.m % loss.tiles.m == 0 else "(out_rows[:, None] < M)",
        "" if loss.n % loss.tiles.n == 0 else "(out_columns[None, :] < N)",
    )
    result = Operand("gradient", "mk", (loss.m, loss.n), loss.dtype)
    finish = fill(
        GRADIENT,
        wide=result.wide,
        dtype=loss.dtype,
        mask=mask,
        slope="acc *= 1.0 - bounded * bounded" if loss.soft_cap else "",
    )
    rest = (
        *(Argument(name, "pointer", "float64") for name in ("lse", "g_lse", "g_target")),
        Argument("gradient", "pointer", loss.dtype),
    )
    return _product(loss, "linear_cross_entropy_gradient", finish, rest)


def _product(
    loss: LinearCrossEntropy, entry: str, finish: str, rest: tuple[Argument, ...]
) -> Kernel:
    tiles, target = loss.tiles, loss.target
    x = Operand("x", "mk", (loss.m, loss.k), loss.dtype)
    w = Operand("w", "nk", (loss.n, loss.k), loss.dtype)
    if use_descriptors(target, (x, w)):
        x, w = described(x), described(w)
    product = Product(x, w)
    rows = Span("row", "M", loss.m % tiles.m == 0)
    columns = Span("column", "N", loss.n % tiles.n == 0)
    tile_rows = ceil_div(loss.m, tiles.m)
    programs = min(tile_rows * loss.columns, target.processors)
    arguments = (
        x.argument(tiles),
        w.argument(tiles),
        Argument("target", "pointer", "int64"),
        *rest,
        Argument("start", "int64"),
    )
    text = fill(
        KERNEL,
        name=entry,
        arguments=signature(arguments),
        zeros=product.zeros(),
        steps=product.steps(rows, (columns,), Span("0", "K", loss.k % tiles.k == 0)),
        finish=finish,
        cap=CAP if loss.soft_cap else "",
    )
    constants: dict[str, float] = {
        "M": loss.m,
        "N": loss.n,
        "K": loss.k,
        **tiles.constants,
        "TILES_M": tile_rows,
        "TILES_N": loss.columns,
        "PROGRAMS": programs,
        **({"SOFT_CAP": loss.soft_cap} if loss.soft_cap else {}),
    }
    title = f"Cross entropy of x[{loss.m}, {loss.k}] @ w.T with {loss.n} columns, {target.name}."
    return Kernel(
        f"{entry}_{loss.label}",
        module(title, constants, tile_order.plain(tile_rows, tiles.group), text),
        entry,
        arguments,
        (programs,),
        target,
        tiles.warps,
        tiles.stages,
        matrix=on_tensor_cores(loss.dtype),
    )
