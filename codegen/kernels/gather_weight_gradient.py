"""The weight gradient of a linear whose one factor must be gathered: the contraction is gathered.

    dw[n, k] = dy[m, n].T @ x[m, k]

x is gathered in the backward of a column-parallel linear, dy in that of a row-parallel one, over
the m rows. Every tile reads all rows, so a program goes through them shard by shard, its own first,
and waits for each. Only the first tile of a program waits in fact; what it hides is one wave. The
order of the sum depends on the rank, but not on who came first.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels import protocol, tile_order
from msc.codegen.kernels.description import Kernel, Target, Tiles, ceil_div
from msc.codegen.kernels.dtypes import check_dtype, on_tensor_cores, short
from msc.codegen.kernels.epilogue import Epilogue, Store, store_tile
from msc.codegen.kernels.product import Operand, Product, Span, described, use_descriptors
from msc.codegen.kernels.protocol import Chunks
from msc.codegen.kernels.source import fill, module
from msc.ir.errors import PlanError

KERNEL = """
@triton.jit(do_not_specialize=["rank", "want"])
def gather_weight_gradient(dy, x, dw, flags, rank, want):
    for tile in range(tl.program_id(0), TILES_M * TILES_N, PROGRAMS):
        tile_m, tile_n = tile_at(tile)
        row = tile_m * BM
        column = tile_n * BN
        <<zeros>>
        for step in range(RANKS):
            chunk = (rank + step) % RANKS
            if chunk != rank:
                <<waits>>
            start = chunk * CHUNK
            <<steps>>
        <<store>>
"""

WAIT_ALL = """
for part in range(SPLITS):
    wait(flags + chunk * SPLITS + part, want)
"""


@dataclass(frozen=True)
class GatherWeightGradient:
    """dw[n, k] = dy[m, n].T @ x[m, k], of which `gathered` ("x" or "dy") fills as flags tell.

    Flags and `want` are those of `GatherGemm`.
    """

    m: int
    n: int
    k: int
    gathered: str
    ranks: int
    dtype: str
    target: Target
    tiles: Tiles
    splits: int = 1

    def __post_init__(self) -> None:
        check_dtype("all-gather + weight gradient", self.dtype)
        if self.gathered not in ("x", "dy"):
            raise PlanError(f"a weight gradient reads x and dy, not {self.gathered!r}")

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return (
            f"gather_{self.gathered}_weight_gradient_tp{self.ranks}_{self.m}x{self.n}x{self.k}"
            f"_{short(self.dtype)}"
        )

    @property
    def chunks(self) -> Chunks:
        """The shards and their flags."""
        return Chunks(self.m, self.ranks, self.splits)


def emit(gradient: GatherWeightGradient) -> Kernel:
    """The kernel. PlanError for uneven shards."""
    tiles, chunks, dtype = gradient.tiles, gradient.chunks, gradient.dtype
    dy = Operand("dy", "km", (gradient.m, gradient.n), dtype)
    x = Operand("x", "kn", (gradient.m, gradient.k), dtype)
    dw = Operand("dw", "mk", (gradient.n, gradient.k), dtype)
    # a descriptor would also read the rows of the next chunk, and count them twice
    whole_steps = chunks.chunk % tiles.k == 0
    by_descriptor = whole_steps and use_descriptors(gradient.target, (dy, x, dw))
    if by_descriptor:
        dy, x = described(dy), described(x)
    product = Product(dy, x)
    rows = Span("row", "N", gradient.n % tiles.m == 0)
    columns = Span("column", "K", gradient.k % tiles.n == 0)
    tile_rows, tile_columns = ceil_div(gradient.n, tiles.m), ceil_div(gradient.k, tiles.n)
    programs = min(tile_rows * tile_columns, gradient.target.processors)
    store = Store("dw", "K", dtype, by_descriptor, dw.wide)
    one_flag = "wait(flags + chunk, want)"
    text = fill(
        KERNEL,
        zeros=product.zeros(),
        waits=one_flag if chunks.splits == 1 else WAIT_ALL,
        steps=product.steps(rows, (columns,), Span("start", "start + CHUNK", whole_steps)),
        store=store_tile(Epilogue(), store, rows, columns, tiles.parts),
    )
    constants = {
        "RANKS": gradient.ranks,
        "CHUNK": chunks.chunk,
        "N": gradient.n,
        "K": gradient.k,
        **tiles.constants,
        "TILES_M": tile_rows,
        "TILES_N": tile_columns,
        "PROGRAMS": programs,
    }
    if chunks.splits > 1:
        constants["SPLITS"] = chunks.splits
    return Kernel(
        gradient.name,
        module(
            f"dw[{gradient.n}, {gradient.k}] over {gradient.m} rows, {gradient.gathered} "
            f"gathered over {gradient.ranks} ranks, for {gradient.target.name}.",
            constants,
            protocol.wait(through_tma=by_descriptor),
            tile_order.plain(tile_rows, tiles.group),
            text,
        ),
        "gather_weight_gradient",
        (
            dy.argument(tiles),
            x.argument(tiles),
            store.argument(tiles),
            *protocol.WAIT_ARGUMENTS,
        ),
        (programs,),
        gradient.target,
        tiles.warps,
        tiles.stages,
        matrix=on_tensor_cores(dtype),
    )
