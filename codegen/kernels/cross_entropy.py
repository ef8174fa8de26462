"""Cross entropy on one rank's part of the vocabulary: the terms of `msc.nll_terms`, their gradient.

Neither kernel needs more than this rank's columns, and none of the exponentials is ever in memory.
The ranks combine logsumexps and target logits, a number per row (Megatron-LM, arXiv 1909.08053).
The gradient may overwrite the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.description import Argument, Kernel, Target, ceil_div, power_of_two
from msc.codegen.kernels.dtypes import check_dtype, short
from msc.codegen.kernels.source import fill, module

BLOCK = 4096

TERMS = """
@triton.jit(do_not_specialize=["start"])
def cross_entropy_terms(logits, target, lse, target_logit, start):
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * WIDTH
    highest = float("-inf")
    total = 0.0
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(at + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(values, axis=0))
        # a row of nothing but -inf has no number to subtract
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - finite) + tl.sum(tl.exp(values - finite), axis=0)
        highest = higher
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    # their difference is the loss: float32 would leave few digits of a small one
    tl.store(lse + row, tl.log(total.to(tl.float64)) + shift.to(tl.float64))
    column = tl.load(target + row) - start
    inside = (column >= 0) & (column < WIDTH)
    found = tl.load(at + tl.where(inside, column, 0), mask=inside, other=0.0)
    tl.store(target_logit + row, found.to(tl.float64))
"""

GRADIENT = """
@triton.jit(do_not_specialize=["start"])
def cross_entropy_gradient(logits, target, lse, g_lse, g_target, gradient, start):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row.to(tl.int64) * WIDTH + columns
    values = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    shift = tl.load(lse + row).to(tl.float32)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    result = tl.exp(values - shift) * tl.load(g_lse + row).to(tl.float32)
    column = tl.load(target + row) - start
    hit = columns == column
    result = tl.where(hit, result + tl.load(g_target + row).to(tl.float32), result)
    tl.store(gradient + at, result.to(tl.$dtype), mask=inside)
"""


@dataclass(frozen=True)
class CrossEntropy:
    """logits [rows, width] of dtype, of the columns `start ...` of the vocabulary.

    target: int64 [rows]; one outside of these columns, such as -100, has target logit 0. lse,
    target_logit and their gradients: float64 [rows].
    """

    rows: int
    width: int
    dtype: str
    target: Target

    def __post_init__(self) -> None:
        check_dtype("cross entropy", self.dtype)

    @property
    def label(self) -> str:
        """Its part of a kernel's name."""
        return f"{self.rows}x{self.width}_{short(self.dtype)}"

    @property
    def block(self) -> int:
        """Columns that a program has at a time."""
        return min(BLOCK, max(16, power_of_two(self.width)))


def emit_terms(loss: CrossEntropy) -> Kernel:
    """logits, target, start -> lse, target_logit."""
    results = [Argument(name, "pointer", "float64") for name in ("lse", "target_logit")]
    return _kernel(loss, "cross_entropy_terms", TERMS, results, (loss.rows,))


def emit_gradient(loss: CrossEntropy) -> Kernel:
    """g_lse * softmax, plus g_target at the target; `gradient` may be `logits`."""
    numbers = [Argument(name, "pointer", "float64") for name in ("lse", "g_lse", "g_target")]
    result = Argument("gradient", "pointer", loss.dtype)
    text = fill(GRADIENT, dtype=loss.dtype)
    grid = (loss.rows, ceil_div(loss.width, loss.block))
    return _kernel(loss, "cross_entropy_gradient", text, [*numbers, result], grid)


def _kernel(
    loss: CrossEntropy, entry: str, text: str, rest: list[Argument], grid: tuple[int, ...]
) -> Kernel:
    constants = {"WIDTH": loss.width, "BLOCK": loss.block}
    return Kernel(
        f"{entry}_{loss.label}",
        module(f"Cross entropy over [{loss.rows}, {loss.width}] logits.", constants, text),
        entry,
        (
            Argument("logits", "pointer", loss.dtype),
            Argument("target", "pointer", "int64"),
            *rest,
            Argument("start", "int64"),
        ),
        grid,
        loss.target,
        8,
        2,
    )
