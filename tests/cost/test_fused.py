"""What a fused collective costs: the schedule of its tiles, and what multiplying in parts costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from msc.cost import Cluster
from msc.cost.fused import FusedCall, fused_call
from msc.cost.roofline import Work
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from tests.runtime.build import Builder

H100 = Cluster.load("h100")


def call(kind: str, rows: int, columns: int, ranks: int = 8) -> FusedCall:
    """One GEMM, and nothing read or written besides."""
    work = Work(1.0, torch.bfloat16)
    return FusedCall(kind, ranks, rows // ranks, 1, (columns,), (work,), (), 0, 0)


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "ratio", "speedup"),
    [
        ("all_gather", 8192, 6144, 0.29, 1.29),  # 12 waves: all is hidden
        ("all_gather", 8192, 6144, 0.5, 1.50),
        ("all_gather", 8192, 6144, 1.0, 1.71),  # all but the first part
        ("all_gather", 2048, 6144, 0.29, 1.19),  # 3 waves
        ("all_gather", 8192, 1280, 1.4, 1.38),
        ("reduce_scatter", 8192, 6144, 0.29, 1.29),
        ("reduce_scatter", 8192, 6144, 0.5, 1.50),
        ("reduce_scatter", 8192, 6144, 1.0, 2 / (1 + 1 / 12)),  # all but the first wave
        # 72 of the 336 tiles of others are made in the last of 3 waves
        ("reduce_scatter", 2048, 6144, 0.29, 1.29 / (1 + 0.29 * 72 / 336)),
        ("reduce_scatter", 8192, 1280, 1.4, 2.4 / (1.4 + 1 / 3)),
    ],
)
def test_gains_of_tile_schedules(
    kind: str, rows: int, columns: int, ratio: float, speedup: float
) -> None:
    """Over GEMM, then transfer: gathers by an independent event model of 8 ranks and 132 programs,
    reductions by hand: a tile is sent when it is made."""
    cluster = dataclasses.replace(H100, fused_gemm_rate=1.0)
    found = call(kind, rows, columns).seconds_of(cluster, 1.0, 0.0, ratio)
    assert (1 + ratio) / found == pytest.approx(speedup, abs=0.005)


def test_few_rows_cost_more_than_they_hide() -> None:
    """64 rows of a part fill half a tile, so the GEMM takes twice as long."""
    few, many = (
        call("all_gather", rows, 6144).seconds_of(H100, 1.0, 0.0, 0.3) for rows in (512, 8192)
    )
    assert few > 1.3 > many


@pytest.mark.parametrize(
    ("rows", "flops", "nodes", "why"),
    [
        (8192, 2e11, 1, ""),
        (2048, 1e11, 1, ""),
        (1024, 2e11, 1, "1024 rows; with less than 2048 fused kernels lose"),
        (8192, 9e10, 1, "9.0e+10 FLOPs; with less than 1e+11 fused kernels lose"),
        (8192, 2e11, 2, "the group spans 2 nodes, and fused kernels reach the memory of one"),
    ],
)
def test_what_no_model_may_fuse(rows: int, flops: float, nodes: int, why: str) -> None:
    work = Work(flops, torch.bfloat16)
    found = dataclasses.replace(call("all_gather", rows, 6144), by_rows=(work,))
    assert found.against(H100, nodes) == why


def test_nothing_hides_a_transfer_but_rows_in_parts() -> None:
    """A product over rows needs the whole value; beside a product of rows it is free."""
    by_rows = call("all_gather", 8192, 6144)
    over = dataclasses.replace(by_rows, columns=(), by_rows=(), over_rows=by_rows.by_rows)
    assert over.seconds_of(H100, 0.0, 2.0, 0.5) == 2.5
    both = dataclasses.replace(by_rows, over_rows=by_rows.by_rows)
    assert both.seconds_of(H100, 1.0, 2.0, 0.5) == 2.0 + by_rows.seconds_of(H100, 1.0, 0.0, 0.5)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_transfer_is_never_free_of_charge_and_never_doubled(kind: str) -> None:
    computing = call(kind, 8192, 6144).seconds_of(H100, 1.0, 0.0, 0.0)
    previous = computing
    for transfer in (0.1, 0.5, 1.0, 2.0, 8.0):
        found = call(kind, 8192, 6144).seconds_of(H100, 1.0, 0.0, transfer)
        assert max(computing, transfer, previous) <= found <= computing + transfer
        previous = found


def test_sizes_are_read_off_the_graph() -> None:
    build = Builder()
    x = build.input("x", 2, 128, 16, dtype=torch.bfloat16)
    w = build.input("w", 512, 16, dtype=torch.bfloat16)
    o = build.input("o", 2, 1024, 32, dtype=torch.bfloat16)
    args: tuple[Any, ...] = (x, 1, [w], [None], [False], [o], [True], True, 8, "tp")
    gathers = fused_call(build.call(ALL_GATHER_MATMUL, *args))
    whole = 2 * 1024 * 16
    assert (gathers.kind, gathers.parts, gathers.runs, gathers.part_rows) == (
        "all_gather",
        8,
        2,
        128,
    )
    assert gathers.columns == (512,)
    assert gathers.flops == 2 * 2048 * 16 * (512 + 32)
    assert (gathers.moved_bytes, gathers.extra_bytes) == (2 * whole, 2 * 2 * whole // 8)
    reduces = fused_call(build.call(MATMUL_REDUCE_SCATTER, x, w, None, False, 1, 8, "tp"))
    whole = 2 * 128 * 512
    assert (reduces.kind, reduces.runs, reduces.part_rows) == ("reduce_scatter", 2, 16)
    assert (reduces.moved_bytes, reduces.extra_bytes) == (2 * whole, 2 * whole * 9 // 8)
