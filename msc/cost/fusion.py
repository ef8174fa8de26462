"""Whether a product and its collective are worth one kernel, or are better one after the other.

The tile schedule says what one kernel would take; it must gain enough over the library's product
and the collective. Below the public floors nothing is fused: every design published so far loses
there (kernels of Flux and PyTorch under 2,048 rows, Triton-distributed under 1e11 FLOPs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from msc.cost.cluster import Cluster
from msc.cost.collectives import collective_seconds
from msc.cost.tile_schedule import TileSchedule, gather, scatter
from msc.cost.topology import Span

LEAST_ROWS = 2048
LEAST_FLOPS = 1e11
LEAST_GAIN = 1.03


@dataclass(frozen=True)
class Site:
    """A product `[m, k] @ [k, n]` of one rank beside a collective of m rows over `ranks`.

    kind: "all_gather" (of the rows it reads) or "reduce_scatter" (of the rows it makes). tile: rows
    and columns of a tile. programs: processors of a device. kernel_speed: of the kernel's product
    beside the library's; stock Triton reaches 0.85 to 0.95 of cuBLAS on Hopper.
    """

    kind: str
    m: int
    n: int
    k: int
    ranks: int
    dtype: torch.dtype
    tile: tuple[int, int] = (128, 256)
    programs: int = 132
    kernel_speed: float = 0.9

    @property
    def flops(self) -> float:
        """Of the product."""
        return 2.0 * self.m * self.n * self.k

    @property
    def payload_bytes(self) -> float:
        """The whole value of the collective."""
        width = self.k if self.kind == "all_gather" else self.n
        return float(self.m * width * self.dtype.itemsize)


@dataclass(frozen=True)
class Choice:
    """Whether to fuse, and why; both times in seconds."""

    fused: bool
    reason: str
    fused_s: float
    serial_s: float


def choose(site: Site, cluster: Cluster, span: Span) -> Choice:
    """The choice for a group of `span` on a cluster.

    Inside one node only: peers store to each other's memory. ValueError for another kind.
    """
    if site.kind not in ("all_gather", "reduce_scatter"):
        raise ValueError(f"no fused kernel has a {site.kind}")
    rate = cluster.peak(site.dtype) * cluster.gemm_efficiency
    gemm_s = site.flops / rate
    link_s = collective_seconds(cluster, site.kind, site.payload_bytes, span)
    serial_s = gemm_s + link_s
    schedule = _schedule(site, gemm_s / site.kernel_speed, link_s)
    if site.kind == "all_gather":
        fused_s = gather(schedule).fused_s
    else:
        # the owner reads what every rank has sent, and writes the sum
        chunk_bytes = site.payload_bytes / site.ranks
        summed_s = (site.ranks + 1) * chunk_bytes / cluster.memory_bytes_per_s
        fused_s = scatter(schedule, summed_s).fused_s
    reason = _against(site, span) or _verdict(serial_s / fused_s)
    return Choice(reason.startswith("fused"), reason, fused_s, serial_s)


def _schedule(site: Site, gemm_s: float, link_s: float) -> TileSchedule:
    rows = -(-site.m // site.ranks // site.tile[0])
    columns = -(-site.n // site.tile[1])
    chunk_s = link_s / max(1, site.ranks - 1)
    schedule = TileSchedule(site.ranks, rows, columns, site.programs, 1.0, chunk_s)
    return replace(schedule, tile_s=gemm_s / schedule.waves)


def _against(site: Site, span: Span) -> str:
    """What speaks against one kernel whatever the model says; empty if nothing does."""
    if span.nodes > 1:
        return f"apart: the group spans {span.nodes} nodes, and kernels reach one node's memory"
    if site.m % site.ranks:
        return f"apart: {site.m} rows do not divide over {site.ranks} ranks"
    if site.m < LEAST_ROWS:
        return f"apart: {site.m} rows; below {LEAST_ROWS} fused kernels lose"
    if site.flops < LEAST_FLOPS:
        return f"apart: {site.flops:.1e} FLOPs; below {LEAST_FLOPS:.0e} fused kernels lose"
    return ""


def _verdict(gain: float) -> str:
    if gain < LEAST_GAIN:
        return f"apart: modelled x{gain:.2f}; it takes x{LEAST_GAIN} to be worth it"
    return f"fused: modelled x{gain:.2f}"
