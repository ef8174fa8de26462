"""The order of tiles in emitted kernels is that of the schedule model."""

from __future__ import annotations

from typing import Any

import pytest

from msc.codegen.kernels import tile_order
from msc.cost.tile_schedule import grouped


def compiled(text: str, **constants: int) -> Any:
    namespace: dict[str, Any] = dict(constants)
    exec(text.replace("@triton.jit\n", ""), namespace)
    return namespace["tile_at"]


@pytest.mark.parametrize(("rows", "columns", "group"), [(8, 5, 4), (7, 3, 4), (1, 6, 8), (9, 1, 2)])
def test_grouped(rows: int, columns: int, group: int) -> None:
    tile_at = compiled(tile_order.plain(rows, group), TILES_M=rows, TILES_N=columns, GROUP=group)
    for index in range(rows * columns):
        assert tile_at(index) == grouped(index, rows, columns, group)


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize(("rows", "columns", "group"), [(4, 5, 2), (3, 4, 2)])
def test_chunk_after_chunk(rows: int, columns: int, group: int, own_first: bool) -> None:
    ranks, rank = 4, 3
    text = tile_order.chunked(rows, group, own_first)
    constants = {"RANKS": ranks, "CHUNK_TILES_M": rows, "TILES_N": columns, "GROUP": group}
    tile_at = compiled(text, **constants)
    chunks = [3, 0, 1, 2] if own_first else [0, 1, 2, 3]
    for index in range(ranks * rows * columns):
        step, inside = divmod(index, rows * columns)
        assert tile_at(index, rank) == (chunks[step], *grouped(inside, rows, columns, group))
