"""Seconds of a fused collective: GEMMs in parts, whose transfers run beside them.

The tiles of the GEMMs, on a device that works on `multiprocessors` of them at once, and the parts
that travel are events of `msc.cost.tile_schedule`: gathering, the own shard comes first, which is
there; reducing, the own part comes last (Chang et al., "FLUX", arXiv 2406.06858). What stays
exposed is the first or the last part, or what the link cannot move in the time of the GEMMs.

What it costs to multiply in parts: the rows of a part are rounded up to tiles on their own, waits
leave programs idle, and such a kernel runs at `fused_gemm_rate` of the library's rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from msc.cost.cluster import Cluster
from msc.cost.flops import nbytes
from msc.cost.roofline import Work
from msc.cost.tile_schedule import TileSchedule, gather, scatter
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
    def rows(self) -> int:
        """Of the gathered value, or of the one to be reduced."""
        return self.parts * self.runs * self.part_rows

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
        whole_tiles = math.ceil(self.rows / TILE_ROWS) * wide  # as many as the library has
        waves = math.ceil(whole_tiles / cluster.multiprocessors)
        schedule = TileSchedule(
            self.parts,
            self.runs * math.ceil(self.part_rows / TILE_ROWS),
            wide,
            cluster.multiprocessors,
            tile_s=by_rows_s / cluster.fused_gemm_rate / waves,
            chunk_s=transfer_s / (self.parts - 1),
        )
        return _in_parts(self.kind, schedule) + over_rows_s + moving

    def against(self, cluster: Cluster, nodes: int) -> str:
        """Why a group on so many nodes should not fuse it whatever its model says, or ""."""
        if nodes > 1:
            return f"the group spans {nodes} nodes, and fused kernels reach the memory of one"
        if self.rows < cluster.fused_least_rows:
            return f"{self.rows} rows; with less than {cluster.fused_least_rows} fused kernels lose"
        if self.flops < cluster.fused_least_flops:
            least = f"{cluster.fused_least_flops:.0e}"
            return f"{self.flops:.1e} FLOPs; with less than {least} fused kernels lose"
        return ""


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
def _in_parts(kind: str, schedule: TileSchedule) -> float:
    """Seconds of the GEMMs in parts and of the transfers that they do not hide."""
    run = gather if kind == "all_gather" else scatter
    return run(schedule).fused_s
