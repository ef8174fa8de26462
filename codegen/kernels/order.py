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


def plain(rows: int, group: int) -> str:
    """The function `tile_at(index)` of a result that has `rows` rows of tiles (TILES_M)."""
    return fill(PLAIN, height="GROUP" if rows % group == 0 else "min(TILES_M - first, GROUP)")
