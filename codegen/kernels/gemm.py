"""One matrix product on one device, with what follows it: forward, input and weight gradient.

A persistent kernel: as many programs as the device has processors, each taking every so many-th
tile, so that the epilogue of one tile overlaps with the loads of the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msc.codegen.kernels import tile_order
from msc.codegen.kernels.description import Kernel, Target, Tiles, ceil_div, signature
from msc.codegen.kernels.dtypes import check_dtype, on_tensor_cores, short
from msc.codegen.kernels.epilogue import Epilogue, Store, store_tile
from msc.codegen.kernels.product import Operand, Product, Span, described, use_descriptors
from msc.codegen.kernels.source import fill, module

KERNEL = """
@triton.jit
def gemm($arguments):
    for tile in $loop:
        tile_m, tile_n = tile_at(tile)
        row = tile_m * BM
        column = tile_n * BN
        <<zeros>>
        <<steps>>
        <<store>>
"""


@dataclass(frozen=True)
class Gemm:
    """c[m, n] = epilogue(a @ b); a is [m, k] or [k, m], b is [n, k] or [k, n], all contiguous.

    With "swiglu" b has 2 n rows: those of the gate, then those of up; or, if the epilogue says that
    they are apart, b has those of the gate and b_up, alike, those of up. stored: the dtype of c and
    of what the epilogue reads, "" for that of a and b.
    """

    m: int
    n: int
    k: int
    dtype: str
    target: Target
    tiles: Tiles
    a_layout: str = "mk"
    b_layout: str = "nk"
    epilogue: Epilogue = field(default_factory=Epilogue)
    stored: str = ""

    @property
    def result(self) -> str:
        """The dtype of c."""
        return self.stored or self.dtype

    @property
    def name(self) -> str:
        """Unique among kernels: what it computes, at which size and in which tiles."""
        layouts = f"{self.a_layout}_{self.b_layout}{self.epilogue.label}"
        dtypes = "_to_".join(short(each) for each in dict.fromkeys((self.dtype, self.result)))
        return f"gemm_{layouts}_{self.m}x{self.n}x{self.k}_{dtypes}"


def emit(gemm: Gemm) -> Kernel:
    """The kernel. PlanError for a dtype that it does not compute on."""
    check_dtype("gemm", gemm.dtype)
    tiles, target = gemm.tiles, gemm.target
    rows, columns = ceil_div(gemm.m, tiles.m), ceil_div(gemm.n, tiles.n)
    a, b = operands(gemm)
    output = Operand("c", "mk", (gemm.m, gemm.n), gemm.result)  # only its alignment is asked for
    by_descriptor = use_descriptors(target, (a, b, output))
    if by_descriptor:
        a, b = described(a), described(b)
    up = replace(b, name="b_up") if gemm.epilogue.apart else None
    product = Product(a, b, gemm.epilogue.accumulators, up)
    row_span = Span("row", "M", gemm.m % tiles.m == 0)
    column_span = Span("column", "N", gemm.n % tiles.n == 0)
    right_spans = gemm.epilogue.right_columns(column_span)
    # a tile of wider elements has no room in shared memory beside the factors
    store_described = by_descriptor and gemm.result == gemm.dtype
    store = Store("c", "N", gemm.result, store_described, output.wide)
    arguments = (
        a.argument(tiles),
        b.argument(tiles),
        *([] if up is None else [up.argument(tiles)]),
        store.argument(tiles),
        *gemm.epilogue.arguments(gemm.result),
    )
    programs = min(rows * columns, target.processors)
    text = fill(
        KERNEL,
        arguments=signature(arguments),
        loop="tl.range(tl.program_id(0), TILES_M * TILES_N, PROGRAMS, flatten=True)"
        if by_descriptor
        else "range(tl.program_id(0), TILES_M * TILES_N, PROGRAMS)",
        zeros=product.zeros(),
        steps=product.steps(row_span, right_spans, Span("0", "K", gemm.k % tiles.k == 0)),
        store=store_tile(gemm.epilogue, store, row_span, column_span, tiles.parts),
    )
    constants = {
        "M": gemm.m,
        "N": gemm.n,
        "K": gemm.k,
        **tiles.constants,
        "TILES_M": rows,
        "TILES_N": columns,
        "PROGRAMS": programs,
    }
    title = f"c[{gemm.m}, {gemm.n}] = a @ b over {gemm.k}, for {target.name}."
    return Kernel(
        gemm.name,
        module(title, constants, tile_order.plain(rows, tiles.group), text),
        "gemm",
        arguments,
        (programs,),
        target,
        tiles.warps,
        tiles.stages,
        matrix=on_tensor_cores(gemm.dtype),
    )


def operands(gemm: Gemm) -> tuple[Operand, Operand]:
    """Both factors, with the shapes that their layouts give."""
    halves = gemm.epilogue.gated and not gemm.epilogue.apart
    b_rows = 2 * gemm.n if halves else gemm.n
    a_shape = (gemm.m, gemm.k) if gemm.a_layout == "mk" else (gemm.k, gemm.m)
    b_shape = (b_rows, gemm.k) if gemm.b_layout == "nk" else (gemm.k, b_rows)
    a = Operand("a", gemm.a_layout, a_shape, gemm.dtype)
    return a, Operand("b", gemm.b_layout, b_shape, gemm.dtype)
