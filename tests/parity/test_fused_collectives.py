"""Programs with fused collectives compute what one device does, on all meshes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import msc
from msc.codegen.emit import emit
from msc.ir.communication import FUSED, fused_nodes
from msc.passes.forward_only import forward_only
from msc.runtime.memory.predict import MemoryPredictor
from tests import models


def small(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        return models.GPT(layers=2, width=32)
    return models.Llama(layers=2, width=32)


def fused(program: msc.Program) -> int:
    return sum(len(fused_nodes(graph)) for graph in program.rank_graphs)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"mesh": "tp=4"}),
    ("gpt", {"mesh": "dp=2,tp=2", "microbatches": 2, "recompute": "selective"}),
    ("gpt", {"mesh": "pp=2,dp=2,tp=2", "recompute": "full"}),
    ("gpt", {"mesh": "pp=2,tp=2", "microbatches": 2, "schedule": "zb-h1"}),
    ("llama", {"mesh": "tp=2", "rewrites": [msc.ParallelBlock()]}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_parity(name: str, options: dict[str, Any]) -> None:
    report = msc.verify(
        small(name), models.tokens(), dtype=torch.float64, fuse_collectives=True, **options
    )
    assert report.ok, report.first_difference
    assert report.max_error < 1e-10


def test_half_types_stay_near() -> None:
    report = msc.verify(
        small("gpt"), models.tokens(), mesh="tp=2", precision="bfloat16", fuse_collectives=True
    )
    assert report.ok, report.first_difference


def test_a_saved_program_is_the_same(tmp_path: Path) -> None:
    program = msc.compile(small("llama"), models.tokens(), mesh="tp=2", fuse_collectives=True)
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert loaded.fingerprint == program.fingerprint
    assert loaded.report.fused_collectives == program.report.fused_collectives
    assert fused(loaded) == fused(program) > 0
    one, other = (each.run_virtual(models.tokens()) for each in (program, loaded))
    torch.testing.assert_close(other.grads, one.grads, rtol=0, atol=0)


def test_every_view_of_a_program_has_them() -> None:
    """Flat graphs, report, explanation and simulation; evaluation needs no gathered value."""
    program = msc.compile(small("llama"), models.tokens(), mesh="tp=2", fuse_collectives=True)
    flat = [node for gm in program.graphs(0).values() for node in gm.graph.nodes]
    names = {FUSED[node.target] for node in flat if node.target in FUSED}
    assert names == {"all_gather_matmul", "matmul_reduce_scatter"}
    count = sum(node.target in FUSED for node in flat)
    sent = program.report.collectives[0]
    assert sum(sent[f"{name} over tp"][0] for name in names) == count
    text = str(program.explain())
    assert all(f"{name} over tp" in text for name in names)
    simulated = program.simulate("h100").classes[0].communication
    assert sum(simulated["tp", name].calls for name in names) == count
    step = emit(program.rank_graph(0), "process").source
    assert re.search(r" = rt.all_gather_matmul\(.*, 2, 'tp', '%all_gather_matmul", step)
    evaluation = forward_only(program.rank_graph(0))
    assert fused_nodes(evaluation)
    predictor = MemoryPredictor()
    assert predictor.bytes(evaluation) < predictor.bytes(program.rank_graph(0))


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_what_the_option_may_be(wrong: Any) -> None:
    with pytest.raises(msc.UserError, match=r"fuse_collectives is .*; it is 'auto', True"):
        msc.compile(small("gpt"), models.tokens(), mesh="tp=2", fuse_collectives=wrong)
