"""On a cluster the pass says whether the kernel pays, and marks the ops where it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

import msc
from msc.cost import Cluster
from msc.cost.epilogue import IN_KERNEL
from msc.cost.node_work import node_work
from msc.ir.communication import graphs_below
from msc.ir.ops.epilogue import LINEAR_EPILOGUE
from msc.passes.fuse_epilogue.apply import FuseEpilogue
from tests import models
from tests.passes.graphs import GPT, captured, through, token_batch

H100 = Cluster.load("h100")


def compiled(rate: float) -> msc.Program:
    cluster = replace(H100, fused_gemm_rate=rate)
    return msc.compile(models.GPT(layers=1), models.tokens(), cluster=cluster)


@pytest.mark.parametrize("pays", [False, True])
def test_a_kernel_is_chosen_where_the_cluster_file_says_that_it_pays(pays: bool) -> None:
    """The passes over memory that it saves against what its product is slower: of tiny products
    both are launches, of which a kernel saves one, unless it is very slow."""
    program = compiled(0.9 if pays else 1e-4)
    up = next(each for each in program.report.epilogues if "h.0.up, gelu" in each)
    assert ("on CUDA by a kernel, " if pays else "on CUDA by the library, ") in up
    assert "us of passes over memory against" in up
    nodes = [
        node
        for gm in graphs_below(program.rank_graphs[0])
        for node in gm.graph.find_nodes(op="call_function", target=LINEAR_EPILOGUE)
    ]
    assert {bool(node.meta.get("marks", {}).get(IN_KERNEL)) for node in nodes} == {pays}
    (line,) = [
        each
        for each in program.kernels("sm_90").lines
        if each.startswith("msc.linear_epilogue in h.0.up: ")
    ]
    chosen = "in_h.0.up: Triton, gemm_mk_nk_bias_gelu_keep" if pays else "ATen: cuBLAS, then a pass"
    assert chosen.removeprefix("in_h.0.up: ") in line
    assert line.endswith("; by the cluster file it pays") == pays
    # the model of the step has what runs: passes of their own, or a slower product
    assert all(bool(node_work(node).passes) != pays for node in nodes)
    assert all(node_work(node).emitted == pays for node in nodes)


def test_without_a_cluster_the_library_keeps_the_product() -> None:
    program = msc.compile(models.GPT(layers=1), models.tokens())
    assert not any("on CUDA" in each for each in program.report.epilogues)
    lines = program.kernels("sm_90").lines
    assert any("msc.linear_epilogue in h.0.up: ATen: cuBLAS, then a pass" in each for each in lines)


def test_a_second_run_changes_nothing() -> None:
    unit = through("fuse-epilogue", captured(GPT(vocab=64, layers=2), "tp=2", token_batch(64, 4)))
    assert any(each.changed for each in unit.epilogues)
    assert FuseEpilogue().run(unit) == 0
