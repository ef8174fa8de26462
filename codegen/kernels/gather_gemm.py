"""All-gather and matrix products in one kernel: a tile starts when the rows that it reads are there.

Copy engines fill `a`, the buffer of the gathered rows, from the other ranks' shards and raise a
flag per shard (or per part of one); this rank's own rows are in it from the start. The kernel takes
its own rows first and then those of the next ranks, in the order in which they are copied.

Flux (arXiv 2406.06858) and PyTorch's Kraken have this design; see also TileLink (arXiv 2503.20313).

Two buffers in turns are enough. Before call e + 2 overwrites a shard that is read by others in call
e, its rank has ended call e + 1, which waited for shards that their ranks announced after ending e.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels import protocol
from msc.codegen.kernels.description import (
    Argument,
    Kernel,
    Target,
    Tiles,
    ceil_div,
    check_dtype,
)
from msc.codegen.kernels.epilogue import Epilogue, Store, store_tile
from msc.codegen.kernels.product import Operand, Product, Span, short, use_descriptors
from msc.codegen.kernels.protocol import Chunks
from msc.codegen.kernels.source import fill, module
from msc.ir.errors import PlanError

KERNEL = """
@triton.jit
def gather_gemm($arguments, flags, rank, want):
    for tile in range(tl.program_id(0), RANKS * CHUNK_TILES_M * TILES_N, PROGRAMS):
        chunk, tile_m, tile_n = tile_at(tile, rank)
        row = chunk * CHUNK + tile_m * BM
        if chunk != rank:
            <<waits>>
        <<results>>
"""

WAIT_ONE = "wait(flags + chunk$part, want)"

WAIT_PARTS = """
# the last rows of the tile may be another part's
first = tile_m * BM // PART
last = min(tile_m * BM + BM, CHUNK) - 1
for part in range(first, last // PART + 1):
    wait(flags + chunk * SPLITS + part, want)
"""


@dataclass(frozen=True)
class Result:
    """One product of the gathered rows: c[m, n] = epilogue(a @ b)."""

    n: int
    epilogue: Epilogue


@dataclass(frozen=True)
class GatherGemm:
    """c_i[m, n_i] = epilogue_i(gathered a [m, k] @ b_i), for one or several b_i.

    b_layout: "nk" for a weight as `nn.Linear` keeps it (forward), "kn" for the input gradient of a
    row-parallel linear. Call number e passes want = e, and a flag is set to e when its rows are
    there. splits: flags per shard.
    """

    m: int
    k: int
    results: tuple[Result, ...]
    ranks: int
    dtype: str
    target: Target
    tiles: Tiles
    b_layout: str = "nk"
    splits: int = 1

    @property
    def name(self) -> str:
        """Unique among kernels."""
        sizes = "_".join(f"{result.n}{result.epilogue.label}" for result in self.results)
        return (
            f"gather_gemm_{self.b_layout}_tp{self.ranks}_{self.m}x{self.k}_to_{sizes}"
            f"_{short(self.dtype)}"
        )

    @property
    def chunks(self) -> Chunks:
        """The shards and their flags."""
        return Chunks(self.m, self.ranks, self.splits)


def emit(gather: GatherGemm) -> Kernel:
    """The kernel. PlanError for a dtype, for uneven shards, and for no result."""
    check_dtype("all-gather + linear", gather.dtype)
    if not gather.results:
        raise PlanError("all-gather + linear without a product")
    tiles, chunks = gather.tiles, gather.chunks
    writers = [_Writer(gather, number) for number in range(len(gather.results))]
    described = use_descriptors(
        gather.target, (_gathered(gather), *(x for w in writers for x in (w.right, w.output)))
    )
    arguments = [_gathered(gather).argument(tiles, described)]
    for writer in writers:
        arguments.extend(writer.arguments(described))
    columns = sum(writer.columns for writer in writers)
    chunk_tiles = ceil_div(chunks.chunk, tiles.m)
    total = gather.ranks * chunk_tiles * columns
    programs = min(total, gather.target.processors)
    constants = {
        "RANKS": gather.ranks,
        "CHUNK": chunks.chunk,
        "K": gather.k,
        "BM": tiles.m,
        "BN": tiles.n,
        "BK": tiles.k,
        "GROUP": tiles.group,
        "CHUNK_TILES_M": chunk_tiles,
        "TILES_N": columns,
        "PROGRAMS": programs,
    }
    if chunks.splits > 1:
        constants |= {"SPLITS": chunks.splits, "PART": chunks.part}
    text = fill(
        KERNEL,
        arguments=", ".join(argument.name for argument in arguments),
        waits=_waits(chunks, tiles),
        results=_results(writers, described),
    )
    sizes = ", ".join(str(result.n) for result in gather.results)
    return Kernel(
        gather.name,
        module(
            f"all-gather of a[{gather.m}, {gather.k}] over {gather.ranks} ranks, then products "
            f"with {sizes} columns, for {gather.target.name}.",
            constants,
            protocol.wait(through_tma=described),
            protocol.chunked_order(chunk_tiles, tiles.group, own_first=True),
            text,
        ),
        "gather_gemm",
        (
            *arguments,
            Argument("flags", "pointer", "int32"),
            Argument("rank", "int32"),
            Argument("want", "int32"),
        ),
        (programs,),
        gather.target,
        tiles.warps,
        tiles.stages,
        matrix=gather.dtype != "float32",
    )


def _gathered(gather: GatherGemm) -> Operand:
    return Operand("a", "mk", (gather.m, gather.k), gather.dtype)


def _waits(chunks: Chunks, tiles: Tiles) -> str:
    if chunks.splits == 1:
        return fill(WAIT_ONE, part="")
    if chunks.part % tiles.m == 0:
        return fill(WAIT_ONE, part=" * SPLITS + tile_m * BM // PART")
    return WAIT_PARTS


class _Writer:
    """The text of one of the products."""

    def __init__(self, gather: GatherGemm, number: int) -> None:
        self.gather, self.result = gather, gather.results[number]
        self.suffix = f"_{number}" if len(gather.results) > 1 else ""
        n, epilogue = self.result.n, self.result.epilogue
        stored = 2 * n if epilogue.activation == "swiglu" else n
        shape = (stored, gather.k) if gather.b_layout == "nk" else (gather.k, stored)
        self.right = Operand(f"b{self.suffix}", gather.b_layout, shape, gather.dtype)
        self.output = Operand(f"c{self.suffix}", "mk", (gather.m, n), gather.dtype)
        self.columns = ceil_div(n, gather.tiles.n)

    def arguments(self, described: bool) -> list[Argument]:
        tiles, dtype = self.gather.tiles, self.gather.dtype
        block = (tiles.m, tiles.n // tiles.parts)
        own = (
            Argument(self.output.name, "descriptor", dtype, block)
            if self._stores_by_descriptor(described)
            else Argument(self.output.name, "pointer", dtype)
        )
        extra = self.result.epilogue.arguments(dtype, self.suffix)
        return [self.right.argument(tiles, described), own, *extra]

    def text(self, described: bool) -> str:
        gather, n = self.gather, self.result.n
        epilogue = self.result.epilogue
        rights = (self.right,) * len(epilogue.accumulators)
        product = Product(_gathered(gather), rights, epilogue.accumulators, described)
        exact = gather.chunks.chunk % gather.tiles.m == 0
        rows = Span("row", "(chunk + 1) * CHUNK", exact)
        column = Span("column", str(n), n % gather.tiles.n == 0)
        spans = (column, Span(f"{n} + column", str(2 * n), column.exact))[: len(rights)]
        depth = Span("0", "K", gather.k % gather.tiles.k == 0)
        store = Store(
            self.output.name,
            n,
            gather.dtype,
            self._stores_by_descriptor(described),
            self.output.wide,
        )
        stored = store_tile(epilogue, store, rows, column, gather.tiles.parts, self.suffix)
        return "\n".join([product.zeros(), product.steps(rows, spans, depth), stored])

    def _stores_by_descriptor(self, described: bool) -> bool:
        # a descriptor would also write the rows of the next chunk
        return described and self.gather.chunks.chunk % self.gather.tiles.m == 0


def _results(writers: list[_Writer], described: bool) -> str:
    if len(writers) == 1:
        return f"column = tile_n * BN\n{writers[0].text(described)}"
    lines: list[str] = []
    start = 0
    for number, writer in enumerate(writers):
        end = start + writer.columns
        last = number == len(writers) - 1
        word = "if" if number == 0 else "elif"
        head = "else:" if last else f"{word} tile_n < {end}:"
        column = "column = tile_n * BN" if start == 0 else f"column = (tile_n - {start}) * BN"
        branch = f"{head}\n    <<body>>"
        lines.append(fill(branch, body=f"{column}\n{writer.text(described)}"))
        start = end
    return "\n".join(lines)
