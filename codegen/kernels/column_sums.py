"""Adds up partial sums of several programs, in the order of the programs: the same on every run."""

from __future__ import annotations

from msc.codegen.kernels.description import Argument, Kernel, Target, ceil_div
from msc.codegen.kernels.dtypes import check_dtype
from msc.codegen.kernels.source import fill, module

BLOCK = 128

KERNEL = """
@triton.jit
def column_sums(parts, total):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in range(ROWS):
        sums += tl.load(parts + row * WIDTH + columns, mask=inside, other=0.0)
    tl.store(total + columns, sums.to(tl.$dtype), mask=inside)
"""


def emit(rows: int, width: int, dtype: str, target: Target) -> Kernel:
    """parts: float32 [rows, width] -> total: [width] of dtype."""
    check_dtype("column sums", dtype)
    constants = {"ROWS": rows, "WIDTH": width, "BLOCK": BLOCK}
    return Kernel(
        f"column_sums_{rows}x{width}_{dtype}",
        module(f"Sums of the columns of [{rows}, {width}].", constants, fill(KERNEL, dtype=dtype)),
        "column_sums",
        (Argument("parts", "pointer", "float32"), Argument("total", "pointer", dtype)),
        (ceil_div(width, BLOCK),),
        target,
        4,
        3,
    )
