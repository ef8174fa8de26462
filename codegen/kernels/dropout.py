"""Dropout whose every bit follows from a key and the element's place in the whole tensor.

The bits are those of `msc.ir.ops.random`: splitmix64's finalizer (Steele, Lea and Flood, OOPSLA
2014) of `key + (place + 1) * golden`, whatever part of the tensor a rank has. The backward is the
same kernel, on the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msc.codegen.kernels.description import Argument, Kernel, Target, ceil_div, signature
from msc.codegen.kernels.dtypes import check_dtype, short
from msc.codegen.kernels.source import fill, module
from msc.ir.errors import PlanError

BLOCK = 1024

KERNEL = """
@triton.jit
def dropout($arguments):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.program_id(0)
    place = tl.load(row_places + row) + $column
    z = tl.load(key).to(tl.uint64, bitcast=True) + (place + 1).to(tl.uint64) * GOLDEN
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = z ^ (z >> 31)
    dropped = z.to(tl.int64, bitcast=True) < THRESHOLD
    at = row.to(tl.int64) * WIDTH + columns
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, tl.where(dropped, 0.0, value * SCALE).to(tl.$dtype), mask=inside)
"""


@dataclass(frozen=True)
class Dropout:
    """y = x / (1 - p) where it is kept, else 0; x [rows, width] is a part of a whole tensor.

    row_places, column_places: int64; the sum of both is an element's place in the whole, row-major.
    whole_rows: x has whole rows of the tensor, and takes no column_places. key: int64 [1], of
    `msc.rng_key`.
    """

    rows: int
    width: int
    p: float
    dtype: str
    target: Target
    whole_rows: bool = True

    def __post_init__(self) -> None:
        check_dtype("dropout", self.dtype)
        if not 0 <= self.p < 1:
            raise PlanError(f"dropout: the kernel takes 0 <= p < 1, not {self.p}")


def emit(dropout: Dropout) -> Kernel:
    """The kernel."""
    # the hash is uniform over int64: comparing with p is comparing with its place there
    constants = {
        "WIDTH": dropout.width,
        "BLOCK": BLOCK,
        "GOLDEN": 0x9E3779B97F4A7C15,
        "MIX_1": 0xBF58476D1CE4E5B9,
        "MIX_2": 0x94D049BB133111EB,
        "THRESHOLD": math.ceil(dropout.p * 2.0**64) - (1 << 63),
        "SCALE": 1.0 / (1.0 - dropout.p),
    }
    columns = [] if dropout.whole_rows else [Argument("column_places", "pointer", "int64")]
    arguments = (
        Argument("x", "pointer", dropout.dtype),
        Argument("row_places", "pointer", "int64"),
        *columns,
        Argument("key", "pointer", "int64"),
        Argument("y", "pointer", dropout.dtype),
    )
    placed = "tl.load(column_places + columns, mask=inside, other=0)"
    text = fill(
        KERNEL,
        arguments=signature(arguments),
        column=placed if columns else "columns",
        dtype=dropout.dtype,
    )
    part = "" if dropout.whole_rows else "_part"
    return Kernel(
        f"dropout{part}_{dropout.rows}x{dropout.width}_{short(dropout.dtype)}",
        module(f"Dropout with p = {dropout.p}.", constants, text),
        "dropout",
        arguments,
        (dropout.rows, ceil_div(dropout.width, BLOCK)),
        dropout.target,
        4,
        1,
    )
