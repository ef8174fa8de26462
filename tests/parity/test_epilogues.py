"""Programs with products and norms that take what stands beside them are what one device does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import msc
from msc.ir.communication import graphs_below
from msc.runtime.memory.meter import StorageMeter
from msc.runtime.virtual import VirtualExecutor
from tests import models


def small(name: str, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    build = models.GPT if name == "gpt" else models.Llama
    return build(layers=layers, width=32)


def compiled(name: str, **options: Any) -> msc.Program:
    return msc.compile(small(name), models.tokens(samples=4), **options)


def calls(program: msc.Program) -> Counter[str]:
    """The calls of each op in the distinct graphs of rank 0."""
    nodes = [n for gm in graphs_below(program.rank_graphs[0]) for n in gm.graph.nodes]
    return Counter(str(n.target).removesuffix(".default") for n in nodes)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"mesh": "tp=2", "fuse_collectives": True}),
    ("gpt", {"mesh": "pp=2,dp=2", "microbatches": 2, "recompute": "full"}),
    ("gpt", {"mesh": "dp=2", "microbatches": 2, "zero": 2}),
    ("llama", {"mesh": "tp=2"}),
    ("llama", {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 3, "recompute": "full"}),
    ("llama", {"mesh": "pp=2", "microbatches": 2, "schedule": "zb-v"}),
    ("llama", {"mesh": "dp=2", "rewrites": [msc.ParallelBlock()]}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_parity(name: str, options: dict[str, Any]) -> None:
    layers = 4 if "schedule" in options else 2
    report = msc.verify(
        small(name, layers), models.tokens(samples=4), dtype=torch.float64, **options
    )
    assert report.ok, report.first_difference
    assert report.max_error < 1e-10


@pytest.mark.parametrize(("name", "norm"), [("gpt", "layer_norm"), ("llama", "rms_norm")])
def test_what_a_layer_runs(name: str, norm: str) -> None:
    found = calls(compiled(name))
    own = f"msc.{norm}_backward_add"
    assert found[f"msc.add_{norm}"] == 1  # of the layer's own residual sum
    assert found[own] == 2
    # of the last linear of the layer, whose sum is read by another block's norm
    assert found["msc.linear_epilogue"] == (2 if name == "gpt" else 1)
    assert found["msc.linear_gated"] == (1 if name == "llama" else 0)
    assert found["aten.gelu"] == found["aten.silu"] == found["msc.gated"] == 0


def test_a_collective_has_the_first_choice() -> None:
    program = compiled("gpt", mesh="tp=2", fuse_collectives=True)
    assert calls(program)["msc.linear_epilogue"] == 0
    assert any(
        "h.0.up, gelu in the forward: left alone: its GEMM is one op with a collective" in each
        for each in program.report.epilogues
    )


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_memory_of_a_step_is_predicted(name: str, recompute: str) -> None:
    program = compiled(name, recompute=recompute, precision="float32")
    graph = program.rank_graph(0)
    inputs = program.local_inputs(models.tokens(samples=4), 0)
    given = program.initial_state(0).arguments(graph, inputs)
    with StorageMeter(given) as meter:
        VirtualExecutor(program.mesh, program.rank_graph).run([given])
    assert program.memory_bytes()[0] == pytest.approx(meter.peak, rel=0.03)


def test_the_flops_are_those_of_the_single_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the simulated step too, whose time has a pass over memory less for each sum."""
    cluster = msc.Cluster.load("h100")
    found = [compiled("llama", cluster=cluster)]
    monkeypatch.setenv("MSC_SKIP", "fuse-epilogue,fuse-norm-sums")
    found.append(compiled("llama", cluster=cluster))
    fused, single = (program.simulate(cluster) for program in found)
    assert found[0].report.model_flops == found[1].report.model_flops
    assert fused.classes[0].flops == single.classes[0].flops
    assert fused.step_seconds < single.step_seconds
