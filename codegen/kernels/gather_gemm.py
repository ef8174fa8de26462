"""All-gather and matrix products in one kernel: a tile starts when the rows it reads are there.

Copy engines fill `a`, the buffer of the gathered rows, from the other ranks' shards and raise a
flag per shard (or per part of one); this rank's own rows are in it from the start. The kernel takes
its own rows first and then those of the next ranks, in the order in which they are copied.

Flux (arXiv 2406.06858) and PyTorch's Kraken have this design; see also TileLink (arXiv 2503.20313).

Two buffers in turns are enough. Before call e + 2 overwrites a shard that is read by others in call
e, its rank has ended call e + 1, which waited for shards that their ranks announced after ending e.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from msc.codegen.kernels import protocol, tile_order
from msc.codegen.kernels.description import Argument, Kernel, Target, Tiles, ceil_div, signature
from msc.codegen.kernels.dtypes import check_dtype, on_tensor_cores, short
from msc.codegen.kernels.epilogue import Epilogue, Store, store_tile
from msc.codegen.kernels.product import Operand, Product, Span, described, use_descriptors
from msc.codegen.kernels.protocol import Chunks
from msc.codegen.kernels.source import fill, module
from msc.ir.errors import PlanError

KERNEL = """
@triton.jit(do_not_specialize=["rank", "want"])
def gather_gemm($arguments):
    for tile in range(tl.program_id(0), RANKS * CHUNK_TILES_M * TILES_N, PROGRAMS):
        chunk, tile_m, tile_n = tile_at(tile, rank)
        row = chunk * CHUNK + tile_m * BM
        if chunk != rank:
            <<waits>>
        <<choice>>
        <<zeros>>
        <<steps>>
        <<store>>
"""

WAIT_PARTS = """
# the last rows of the tile may be another part's
first = tile_m * BM // PART
last = min(tile_m * BM + BM, CHUNK) - 1
for part in range(first, last // PART + 1):
    wait(flags + chunk * SPLITS + part, want)
"""


@dataclass(frozen=True)
class GatherGemm:
    """c[m, n] = epilogue(gathered a [m, k] @ b), for one `n` or, with as many b, for several.

    b_layout: "nk" for a weight as `nn.Linear` keeps it (forward), "kn" for the input gradient of a
    row-parallel linear. Call number e passes want = e, and a flag is set to e when its rows are
    there. splits: flags per shard. With several, arguments are numbered: b_0, c_0, b_1, ...
    """

    m: int
    k: int
    widths: tuple[int, ...]
    ranks: int
    dtype: str
    target: Target
    tiles: Tiles
    b_layout: str = "nk"
    splits: int = 1
    epilogue: Epilogue = field(default_factory=Epilogue)

    def __post_init__(self) -> None:
        check_dtype("all-gather + linear", self.dtype)
        if not self.widths:
            raise PlanError("all-gather + linear without a product")
        if self.epilogue.gated and (len(self.widths) > 1 or self.epilogue.apart):
            raise PlanError(
                f"all-gather + linear: {self.epilogue.activation} is of one weight, which holds "
                "gate and up"
            )

    @property
    def name(self) -> str:
        """Unique among kernels."""
        sizes = "_".join(map(str, self.widths))
        return (
            f"gather_gemm_{self.b_layout}_tp{self.ranks}_{self.m}x{self.k}_to_{sizes}"
            f"{self.epilogue.label}_{short(self.dtype)}"
        )

    @property
    def chunks(self) -> Chunks:
        """The shards and their flags."""
        return Chunks(self.m, self.ranks, self.splits)


def emit(gather: GatherGemm) -> Kernel:
    """The kernel. PlanError for uneven shards."""
    tiles, chunks, several = gather.tiles, gather.chunks, len(gather.widths) > 1
    a, b, output = _operands(gather)
    exact = chunks.chunk % tiles.m == 0
    by_descriptor = use_descriptors(gather.target, (a, b, output))
    if by_descriptor:
        a = described(a)
        b = b if several else described(b)
    # a descriptor would also write the rows of the next chunk
    store_described = by_descriptor and exact and not several
    product = Product(a, b, gather.epilogue.accumulators)
    rows = Span("row", "(chunk + 1) * CHUNK", exact)
    column = Span(
        "column", "width" if several else "N", all(n % tiles.n == 0 for n in gather.widths)
    )
    right_columns = gather.epilogue.right_columns(column)
    store = Store("c", column.end, gather.dtype, store_described, output.wide)
    columns = [ceil_div(n, tiles.n) for n in gather.widths]
    chunk_tiles = ceil_div(chunks.chunk, tiles.m)
    programs = min(gather.ranks * chunk_tiles * sum(columns), gather.target.processors)
    constants = {
        "RANKS": gather.ranks,
        "CHUNK": chunks.chunk,
        "K": gather.k,
        **tiles.constants,
        "CHUNK_TILES_M": chunk_tiles,
        "TILES_N": sum(columns),
        "PROGRAMS": programs,
    }
    if not several:
        constants["N"] = gather.widths[0]
    if chunks.splits > 1:
        constants |= {"SPLITS": chunks.splits, "PART": chunks.part}
    arguments = _arguments(gather, a, b, store)
    text = fill(
        KERNEL,
        arguments=signature(arguments),
        waits=_waits(chunks, tiles),
        choice=_choice(gather, columns) if several else "column = tile_n * BN",
        zeros=product.zeros(),
        steps=product.steps(rows, right_columns, Span("0", "K", gather.k % tiles.k == 0)),
        store=store_tile(gather.epilogue, store, rows, column, tiles.parts),
    )
    sizes = ", ".join(map(str, gather.widths))
    return Kernel(
        gather.name,
        module(
            f"all-gather of a[{gather.m}, {gather.k}] over {gather.ranks} ranks, then products "
            f"with {sizes} columns, for {gather.target.name}.",
            constants,
            protocol.wait(through_tma=by_descriptor),
            tile_order.chunked(chunk_tiles, tiles.group, own_first=True),
            text,
        ),
        "gather_gemm",
        arguments,
        (programs,),
        gather.target,
        tiles.warps,
        tiles.stages,
        matrix=on_tensor_cores(gather.dtype),
    )


def _operands(gather: GatherGemm) -> tuple[Operand, Operand, Operand]:
    """The gathered rows, the weight (the widest, of several) and the result."""
    widest = max(gather.widths)
    stored = 2 * widest if gather.epilogue.gated else widest
    shape = (stored, gather.k) if gather.b_layout == "nk" else (gather.k, stored)
    several = len(gather.widths) > 1
    stride = "width" if several and gather.b_layout == "kn" else ""
    return (
        Operand("a", "mk", (gather.m, gather.k), gather.dtype),
        Operand("b", gather.b_layout, shape, gather.dtype, stride=stride),
        Operand("c", "mk", (gather.m, widest), gather.dtype),
    )


def _arguments(gather: GatherGemm, a: Operand, b: Operand, store: Store) -> tuple[Argument, ...]:
    tiles = gather.tiles
    own = (b.argument(tiles), store.argument(tiles), *gather.epilogue.arguments(gather.dtype))
    if len(gather.widths) > 1:
        own = tuple(
            replace(argument, name=f"{argument.name}_{number}")
            for number in range(len(gather.widths))
            for argument in own
        )
    return (a.argument(tiles), *own, *protocol.WAIT_ARGUMENTS)


def _waits(chunks: Chunks, tiles: Tiles) -> str:
    if chunks.splits == 1:
        return "wait(flags + chunk, want)"
    if chunks.part % tiles.m == 0:
        return "wait(flags + chunk * SPLITS + tile_m * BM // PART, want)"
    return WAIT_PARTS


def _choice(gather: GatherGemm, columns: list[int]) -> str:
    """Which of several products a column of tiles belongs to, and what is known of its tensors."""
    names = ["b", "c", *(argument.name for argument in gather.epilogue.arguments(gather.dtype))]
    lines: list[str] = []
    start = 0
    for number, (width, count) in enumerate(zip(gather.widths, columns, strict=True)):
        last = number == len(columns) - 1
        condition = f"{'if' if number == 0 else 'elif'} tile_n < {start + count}:"
        lines.append("else:" if last else condition)
        lines.extend(f"    {name} = {name}_{number}" for name in names)
        lines.append(f"    width = {width}")
        lines.append(
            f"    column = (tile_n - {start}) * BN" if start else "    column = tile_n * BN"
        )
        start += count
    lines.extend(f"{name} = tl.multiple_of({name}, 16)" for name in names)
    common = math.gcd(16, *gather.widths)
    if common > 1:
        lines.append(f"width = tl.multiple_of(width, {common})")
    return "\n".join(lines)
