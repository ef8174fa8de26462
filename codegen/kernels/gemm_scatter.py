"""A matrix product and the reduce-scatter of its result in two kernels.

The first makes tiles. Each goes straight into the memory of the rank that owns its rows, into the
slot of the rank that computed it, and raises that tile's counter there. Chunks of rows come in
order of rank, this rank's own last. The second adds up the tiles that its rank owns, each when its
counter says that it is there: the slots of all ranks, in the order of the ranks, so that the sum
does not depend on who came first.

What waits is apart from what is waited for, so that ranks cannot keep out each other's tiles: the
first kernel waits for nothing, and ends whatever else is on the device. The second takes half of
the processors at most. One kernel that waits on all of them would keep out the communication that
runs beside it, for which the rank that it waits for may have to wait.

Two buffers of slots and of counters in turns are enough. A rank writes call e + 2's tiles only
after its own call e + 1 has ended, which waited for a tile of every rank's call e + 1, which that
rank made after its own call e had ended, with all that it read.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels import protocol, tile_order
from msc.codegen.kernels.description import Argument, Kernel, Target, Tiles, ceil_div, signature
from msc.codegen.kernels.dtypes import check_dtype, on_tensor_cores, short
from msc.codegen.kernels.product import Operand, Product, Span, described, use_descriptors
from msc.codegen.kernels.protocol import Chunks
from msc.codegen.kernels.source import fill, masked, module
from msc.ir.errors import PlanError

KERNEL = """
@triton.jit(do_not_specialize=["rank"])
def gemm_scatter($arguments):
    for tile in range(tl.program_id(0), RANKS * CHUNK_TILES_M * TILES_N, PROGRAMS):
        chunk, tile_m, tile_n = tile_at(tile, rank)
        row = chunk * CHUNK + tile_m * BM
        column = tile_n * BN
        <<zeros>>
        <<steps>>
        # into the owner's memory: its slot for this rank
        owner = tl.load(slots_of + chunk).to(tl.pointer_type(tl.$staged))
        owner = tl.multiple_of(owner, 16)
        slot_rows = tile_m * BM + tl.arange(0, BM)
        slot_columns = column + tl.arange(0, BN)
        <<add>>
        slot_at = (rank * CHUNK + slot_rows)[:, None]$wide * N + slot_columns[None, :]
        tl.store(owner + slot_at, acc.to(tl.$staged)$mask)
        counts = tl.load(counters_of + chunk).to(tl.pointer_type(tl.int32))
        signal(counts + tile_m * TILES_N + tile_n)
"""

SUM = """
@triton.jit(do_not_specialize=["want"])
def scatter_sum(c, slots, counters, want):
    for tile in range(tl.program_id(0), CHUNK_TILES_M * TILES_N, PROGRAMS):
        wait(counters + tile, want)
        slot_rows = tile // TILES_N * BM + tl.arange(0, BM)
        slot_columns = tile % TILES_N * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for source in range(RANKS):
            slot_at = (source * CHUNK + slot_rows)[:, None]$wide * N + slot_columns[None, :]
            total += tl.load(slots + slot_at$load_mask).to(tl.float32)
        tl.store(c + slot_rows[:, None]$wide * N + slot_columns[None, :], total.to(tl.$result)$mask)
"""

ADD_BIAS = """
acc += tl.load(bias + slot_columns$column_mask).to(tl.float32)[None, :]
"""

ADD_ROWS = """
own_at = (chunk * CHUNK + slot_rows)[:, None]$wide * N + slot_columns[None, :]
acc += tl.load(residual + own_at$load_mask).to(tl.float32)
"""


@dataclass(frozen=True)
class GemmScatter:
    """c[m / ranks, n] = the sum over ranks of a[m, k] @ b + add, of the rows that this rank owns.

    a, b: this rank's part of the contraction; b_layout "nk" for the forward of a row-parallel
    linear, "kn" for the input gradient of a column-parallel one. add: "" for nothing, or what each
    rank adds of its own: "bias" [n] or "residual" [m, n]. slots: [ranks, m / ranks, n] of `staged`,
    counters: int32, one per tile of a chunk; `slots_of` and `counters_of` hold their addresses on
    every rank. The two sets of them are used in turns, and in call number e (from 1) the sum is
    passed want = ranks * ((e + 1) // 2): how often each tile of this set was raised.
    """

    m: int
    n: int
    k: int
    ranks: int
    dtype: str
    target: Target
    tiles: Tiles
    b_layout: str = "nk"
    staged: str = ""
    add: str = ""

    def __post_init__(self) -> None:
        if self.add not in ("", "bias", "residual"):
            raise PlanError(f"linear + reduce-scatter adds a bias or a residual, not {self.add!r}")

    @property
    def name(self) -> str:
        """Unique among kernels."""
        staged = f"_via_{short(self.staged)}" if self.staged not in ("", self.dtype) else ""
        added = f"_{self.add}" if self.add else ""
        return (
            f"gemm_scatter_{self.b_layout}{added}_tp{self.ranks}_{self.m}x{self.n}x{self.k}"
            f"_{short(self.dtype)}{staged}"
        )

    @property
    def chunks(self) -> Chunks:
        """The rows that each rank owns."""
        return Chunks(self.m, self.ranks)

    @property
    def counters(self) -> int:
        """Counters of one set."""
        return ceil_div(self.chunks.chunk, self.tiles.m) * ceil_div(self.n, self.tiles.n)


def want(ranks: int, call: int) -> int:
    """What the counters of call number `call` (from 1) reach."""
    return ranks * protocol.uses_of_buffer(call)


def emit(scatter: GemmScatter) -> Kernel:
    """The kernel that makes tiles. PlanError for a dtype and for uneven shards."""
    tiles, chunk, staged = scatter.tiles, scatter.chunks.chunk, _staged(scatter)
    a = Operand("a", "mk", (scatter.m, scatter.k), scatter.dtype)
    shape = (scatter.n, scatter.k) if scatter.b_layout == "nk" else (scatter.k, scatter.n)
    b = Operand("b", scatter.b_layout, shape, scatter.dtype)
    if use_descriptors(scatter.target, (a, b)):
        a, b = described(a), described(b)
    product = Product(a, b)
    row_span = Span("row", "(chunk + 1) * CHUNK", chunk % tiles.m == 0)
    column_span = Span("column", "N", scatter.n % tiles.n == 0)
    inside = _inside(scatter)
    wide = _slots(scatter).wide
    arguments = (
        a.argument(tiles),
        b.argument(tiles),
        *([Argument(scatter.add, "pointer", scatter.dtype)] if scatter.add else []),
        Argument("slots_of", "table"),
        Argument("counters_of", "table"),
        Argument("rank", "int32"),
    )
    added = fill(
        {"": "", "bias": ADD_BIAS, "residual": ADD_ROWS}[scatter.add],
        wide=wide,
        column_mask=masked("" if column_span.exact else "slot_columns < N", other="0.0"),
        load_mask=masked(*inside, other="0.0"),
    )
    text = fill(
        KERNEL,
        arguments=signature(arguments),
        add=added,
        zeros=product.zeros(),
        steps=product.steps(row_span, (column_span,), Span("0", "K", scatter.k % tiles.k == 0)),
        staged=staged,
        wide=wide,
        mask=masked(*inside),
    )
    chunk_tiles = ceil_div(chunk, tiles.m)
    programs = min(scatter.ranks * scatter.counters, scatter.target.processors)
    return Kernel(
        scatter.name,
        module(
            f"a[{scatter.m}, {scatter.k}] @ b{' + ' * bool(scatter.add)}{scatter.add}, each tile "
            f"into the memory of its owner of {scatter.ranks} ranks, for {scatter.target.name}.",
            {
                "RANKS": scatter.ranks,
                "CHUNK": chunk,
                "N": scatter.n,
                "K": scatter.k,
                **tiles.constants,
                "CHUNK_TILES_M": chunk_tiles,
                "TILES_N": ceil_div(scatter.n, tiles.n),
                "PROGRAMS": programs,
            },
            protocol.signal(),
            tile_order.chunked(chunk_tiles, tiles.group, own_first=False),
            text,
        ),
        "gemm_scatter",
        arguments,
        (programs,),
        scatter.target,
        tiles.warps,
        tiles.stages,
        matrix=on_tensor_cores(scatter.dtype),
    )


def emit_sum(scatter: GemmScatter) -> Kernel:
    """The kernel that adds up what all ranks have made of this rank's rows."""
    tiles, chunk, staged = scatter.tiles, scatter.chunks.chunk, _staged(scatter)
    inside = _inside(scatter)
    programs = min(scatter.counters, max(1, scatter.target.processors // 2))
    via = f"_via_{short(staged)}" if staged != scatter.dtype else ""
    return Kernel(
        f"scatter_sum_tp{scatter.ranks}_{scatter.m}x{scatter.n}_{short(scatter.dtype)}{via}",
        module(
            f"c[{chunk}, {scatter.n}] = the sum of {scatter.ranks} slots, for "
            f"{scatter.target.name}.",
            {
                "RANKS": scatter.ranks,
                "CHUNK": chunk,
                "N": scatter.n,
                "BM": tiles.m,
                "BN": tiles.n,
                "CHUNK_TILES_M": ceil_div(chunk, tiles.m),
                "TILES_N": ceil_div(scatter.n, tiles.n),
                "PROGRAMS": programs,
            },
            protocol.wait(through_tma=False),
            fill(
                SUM,
                result=scatter.dtype,
                wide=_slots(scatter).wide,
                mask=masked(*inside),
                load_mask=masked(*inside, other="0.0"),
            ),
        ),
        "scatter_sum",
        (
            Argument("c", "pointer", scatter.dtype),
            Argument("slots", "pointer", staged),
            Argument("counters", "pointer", "int32"),
            Argument("want", "int32"),
        ),
        (programs,),
        scatter.target,
        tiles.warps,
        tiles.stages,
    )


def _staged(scatter: GemmScatter) -> str:
    """The dtype of slots, when both have been found to be one that kernels compute on."""
    staged = scatter.staged or scatter.dtype
    for dtype in (scatter.dtype, staged):
        check_dtype("linear + reduce-scatter", dtype)
    return staged


def _slots(scatter: GemmScatter) -> Operand:
    return Operand("slots", "mk", (scatter.m, scatter.n), _staged(scatter))


def _inside(scatter: GemmScatter) -> tuple[str, str]:
    """What holds of an element of a tile that is one of the slot's; empty where all are."""
    tiles = scatter.tiles
    return (
        "" if scatter.chunks.chunk % tiles.m == 0 else "(slot_rows[:, None] < CHUNK)",
        "" if scatter.n % tiles.n == 0 else "(slot_columns[None, :] < N)",
    )
