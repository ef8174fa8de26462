"""Fused is what the user wants or what shortens a block on a cluster; the rest has reasons."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from msc.cost import Cluster, CostModel
from msc.ir.communication import collective_kind
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.passes.fuse_collectives.apply import FuseCollectives
from msc.passes.overlap import Overlap
from tests.passes.graphs import GPT, captured, through, token_batch


@functools.cache  # no test changes what it gives
def compiled(mesh: str, fuse: bool | str, cluster: Cluster | None = None, length: int = 8) -> Any:
    unit = captured(
        GPT(vocab=64, layers=4, length=length),
        mesh,
        token_batch(64, 4, length),
        fuse_collectives=fuse,
        cost=CostModel(cluster),
    )
    return through("overlap", unit)


def num_fused(unit: Any) -> int:
    targets = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
    return sum(n.target in targets for gm in unit.graphs.values() for n in gm.graph.nodes)


def test_all_that_can_be_is_fused_where_the_user_says_so() -> None:
    unit = compiled("tp=2", True)
    changed = [each for each in unit.fusions if each.changed]
    assert num_fused(unit) == len(changed) >= 8
    assert [str(each) for each in changed if "h.0.up, all_gather" in str(each)] == [
        "fuse-collectives, h.0.up, all_gather over 'tp' in the forward: gathered part by part "
        "inside a GEMM; the gathered value is returned too"
    ]
    gemms = [each.what for each in changed if "h.0.down, all_gather" in str(each)]
    assert gemms == ["gathered part by part inside 2 GEMMs"]


@pytest.mark.parametrize(("fuse", "reasons"), [(False, 0), ("auto", 10)])
def test_nothing_is_fused_without_a_cluster(fuse: bool | str, reasons: int) -> None:
    unit = compiled("tp=2", fuse)
    assert num_fused(unit) == 0
    assert len(unit.fusions) == reasons
    assert all("without a cluster file" in each.what for each in unit.fusions)


SLOW_LINKS = Cluster(
    name="slow links",
    flops_per_s=1e9,
    memory_bytes_per_s=1e10,
    memory_bytes=1e12,
    devices_per_node=8,
    node_bytes_per_s=1e8,
    network_bytes_per_s=1e8,
    node_latency_s=0.0,
    network_latency_s=0.0,
    launch_s=0.0,
)
"""Transfers take a good part of a tiny model's GEMMs, launches nothing."""


def test_what_pays_on_a_cluster_is_fused() -> None:
    """Forward gathers and reductions have nothing else to hide behind; of a backward, both GEMMs of
    a gathered gradient run inside it."""
    unit = compiled("tp=2", "auto", SLOW_LINKS, 512)
    assert num_fused(unit) > 0
    for each in unit.fusions:
        if each.changed:
            assert " us of " in each.what
        else:
            assert "other work hides the transfer as well: the block would take" in each.what
    where = {each.where for each in unit.fusions if each.changed}
    assert "h.0.up, all_gather over 'tp' in the forward" in where
    assert "h.0.down, reduce_scatter over 'tp' in the forward" in where


def test_few_rows_are_not_worth_it_on_a_real_cluster() -> None:
    h100 = Cluster.load("h100")
    unit = compiled("tp=2", "auto", h100)
    assert num_fused(unit) == 0
    assert all("rows; with less than 2048 fused kernels lose" in f.what for f in unit.fusions)
    # nor is it by the model alone
    unit = compiled("tp=2", "auto", replace(h100, fused_least_rows=0, fused_least_flops=0.0))
    assert num_fused(unit) == 0
    assert all("too little to multiply" in each.what for each in unit.fusions)


def test_memory_of_other_nodes_is_out_of_reach() -> None:
    unit = compiled("tp=2", "auto", replace(SLOW_LINKS, devices_per_node=1), 512)
    assert num_fused(unit) == 0
    assert all("the group spans 2 nodes" in each.what for each in unit.fusions)


def test_a_block_that_is_sharded_unequally_stays_as_it_is() -> None:
    unit = captured(GPT(vocab=63, layers=2), "tp=2", token_batch(63, 4), fuse_collectives=True)
    through("overlap", unit)
    left = [each for each in unit.fusions if not each.changed]
    assert left
    assert all("tp shards this block unequally" in each.what for each in left)
    assert any("lm_head" in each.where for each in left)
    assert any("h.0.up" in each.where for each in unit.fusions if each.changed)


def test_a_second_run_changes_nothing() -> None:
    unit = compiled("tp=2", True)
    assert FuseCollectives().run(unit) == 0


def test_overlap_keeps_the_order_of_fused_collectives_and_others() -> None:
    unit = through(
        "fuse-collectives",
        captured(GPT(vocab=64, layers=4), "tp=2", token_batch(64, 4), fuse_collectives=True),
    )
    for name, gm in unit.graphs.items():
        order = [node for node in gm.graph.nodes if collective_kind(node) is not None]
        if name.startswith("block"):
            Overlap().run(gm, unit)
        assert order == [node for node in gm.graph.nodes if collective_kind(node) is not None]
