"""The order in which programs take the tiles of a result.

Tiles are numbered so that programs that run at the same time share loads in L2: `group` rows of
tiles at a time, column after column (Triton's matrix multiplication tutorial). With chunks, all
tiles of one rank's rows come before those of the next, starting with the rows that are there first.
"""

from __future__ import annotations

from msc.codegen.kernels.source import fill

PLAIN = """
@triton.jit
def tile_at(index):
    # groups of GROUP rows of tiles, column after column inside a group
    first = index // (GROUP * TILES_N) * GROUP
    inside = index % (GROUP * TILES_N)
    height = $height
    return first + inside % height, inside // height
"""

CHUNKED = """
@triton.jit
def tile_at(index, rank):
    # chunk after chunk, $order; inside a chunk GROUP rows of tiles, column by column
    chunk = (rank + $shift + index // (CHUNK_TILES_M * TILES_N)) % RANKS
    inside = index % (CHUNK_TILES_M * TILES_N)
    first = inside // (GROUP * TILES_N) * GROUP
    inside = inside % (GROUP * TILES_N)
    height = $height
    return chunk, first + inside % height, inside // height
"""


def plain(rows: int, group: int) -> str:
    """The function `tile_at(index)` of a result that has `rows` rows of tiles (TILES_M)."""
    return fill(PLAIN, height="GROUP" if rows % group == 0 else "min(TILES_M - first, GROUP)")


def chunked(chunk_rows: int, group: int, own_first: bool) -> str:
    """The function `tile_at(index, rank)`: chunk, row of tiles in it, column of tiles.

    A rank's own chunk is the first or the last one. chunk_rows: rows of tiles of a chunk.
    """
    return fill(
        CHUNKED,
        order="this rank's own first" if own_first else "this rank's own last",
        shift=0 if own_first else 1,
        height="GROUP" if chunk_rows % group == 0 else "min(CHUNK_TILES_M - first, GROUP)",
    )
