"""Seconds of a fused collective: GEMMs in parts, whose transfers run beside them.

The kernel is a persistent one: `multiprocessors` programs take the tiles of the GEMMs in order, a
part after the other (Chang et al., "FLUX", arXiv 2406.06858). Gathering, the own shard comes first,
which is there, and the tiles of another part start when it has arrived. Reducing, the own part
comes last, and a part leaves when all its tiles are made; so what stays exposed is the first or the
last part, or what the link cannot move in the time of the GEMMs. Tiles are equal, so a tile starts
when the one `multiprocessors` before it has ended: the model is exact for such a schedule.

What it costs to multiply in parts: the rows of a part are rounded up to tiles on their own, waits
leave programs idle, and such a kernel runs at `fused_gemm_rate` of the library's rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from msc.cost.cluster import Cluster
from msc.cost.flops import nbytes
from msc.cost.roofline import Work
from msc.ir.communication import FUSED, MOVES, moved_tensors
from msc.ir.values import tensor_of

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Of a bf16 GEMM on A100 and H100 (Flux and Kraken use it; other tiles change little)."""


@dataclass(frozen=True)
class FusedCall:
    """What a fused collective does on one rank.

    kind: the collective in it; parts: ranks of the group; part_rows: rows of one part that lie
    together, in each of `runs` runs; columns: of each GEMM that is done in parts (`by_rows`).
    over_rows: GEMMs over the whole gathered value, after it; moved_bytes: of the whole value;
    extra_bytes: read and written besides: the own shard, put where others read it, who gather into
    memory of their own; or what was sent here, to be summed.
    """

    kind: str
    parts: int
    part_rows: int
    runs: int
    columns: tuple[int, ...]
    by_rows: tuple[Work, ...]
    over_rows: tuple[Work, ...]
    moved_bytes: int
    extra_bytes: int

    @property
    def flops(self) -> float:
        """Of all GEMMs."""
        return sum(work.flops for work in (*self.by_rows, *self.over_rows))

    @property
    def dtype(self) -> torch.dtype:
        """Of the GEMMs."""
        dtype = (*self.by_rows, *self.over_rows)[0].dtype
        assert dtype is not None
        return dtype

    def seconds(self, cluster: Cluster, transfer_s: float) -> float:
        """On a device of a cluster; transfer_s: of the collective alone."""
        return self.seconds_of(
            cluster,
            sum(work.seconds(cluster) for work in self.by_rows),
            sum(work.seconds(cluster) for work in self.over_rows),
            transfer_s,
        )

    def seconds_of(
        self, cluster: Cluster, by_rows_s: float, over_rows_s: float, transfer_s: float
    ) -> float:
        """The same, with the seconds that the GEMMs take unfused and whole."""
        moving = self.extra_bytes / cluster.memory_bytes_per_s
        if not self.by_rows:
            return max(cluster.launch_s, transfer_s) + over_rows_s + moving
        wide = sum(math.ceil(n / TILE_COLUMNS) for n in self.columns)
        rows = self.parts * self.runs * self.part_rows
        seconds = _in_parts(
            self.kind == "reduce_scatter",
            self.parts,
            self.runs * math.ceil(self.part_rows / TILE_ROWS) * wide,
            math.ceil(rows / TILE_ROWS) * wide,
            cluster.multiprocessors,
            by_rows_s / cluster.fused_gemm_rate,
            transfer_s,
        )
        return seconds + over_rows_s + moving


def fused_call(node: fx.Node) -> FusedCall:
    """The sizes of a fused collective's node, from the values in the graph."""
    args: Any = node.args
    kind = MOVES[FUSED[node.target]]
    moved = max(map(nbytes, moved_tensors(node)))
    x, size = tensor_of(args[0]), args[-2]
    if kind == "all_gather":
        _, dim, weights, _, transposed, others, *_ = args
        rows = size * x.numel() // x.shape[-1]
        products = [_columns(w, t) for w, t in zip(weights, transposed, strict=True)]
        over = [_gemm(x, x.shape[-1], tensor_of(other).shape[-1], rows) for other in others]
        extra = 2 * moved // size
        around = x.shape[:dim]
        part_rows = rows // size // math.prod(around)
    else:
        _, weight, _, transposed, dim, *_ = args
        rows = x.numel() // x.shape[-1]
        products, over = [_columns(weight, transposed)], []
        extra = moved + moved // size
        around = x.shape[:dim]
        part_rows = rows // size // math.prod(around)
    return FusedCall(
        kind,
        size,
        part_rows,
        math.prod(around),
        tuple(products),
        tuple(_gemm(x, rows, n, x.shape[-1]) for n in products),
        tuple(over),
        moved,
        extra,
    )


def _columns(weight: fx.Node, transposed: bool) -> int:
    return tensor_of(weight).shape[1 if transposed else 0]


def _gemm(like: Tensor, m: int, n: int, k: int) -> Work:
    return Work(2.0 * m * n * k, like.dtype, (m * k + k * n + m * n) * like.element_size())


@lru_cache(maxsize=4096)
def _in_parts(
    reduces: bool,
    parts: int,
    part_tiles: int,
    whole_tiles: int,
    programs: int,
    gemm_s: float,
    transfer_s: float,
) -> float:
    """Seconds of the GEMMs in parts and of the transfers that they do not hide.

    gemm_s: of `whole_tiles` tiles at once; transfer_s: of the parts of all other ranks.
    """
    tile_s = gemm_s / math.ceil(whole_tiles / programs)
    step = transfer_s / (parts - 1)
    arrivals = [0.0] * parts if reduces else [index * step for index in range(parts)]
    ends = _tile_ends(arrivals, part_tiles, programs, tile_s)
    if not reduces:
        return max(ends)
    link = 0.0
    for index in range(parts - 1):
        made = max(ends[index * part_tiles : (index + 1) * part_tiles])
        link = max(link, made) + step
    return max(link, *ends)


def _tile_ends(
    arrivals: Sequence[float], part_tiles: int, programs: int, tile_s: float
) -> list[float]:
    """When each tile ends; those of a part start when it has arrived."""
    ends: list[float] = []
    for arrival in arrivals:
        for _ in range(part_tiles):
            free = ends[-programs] if len(ends) >= programs else 0.0
            ends.append(max(free, arrival) + tile_s)
    return ends
