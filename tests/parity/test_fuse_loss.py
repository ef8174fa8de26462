"""Programs whose head is one op with its loss compute what one device does, on all meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import msc
from msc.ir.communication import graphs_below
from msc.ir.ops import linear_loss
from msc.ir.ops.linear_loss import LINEAR_NLL_TERMS, LINEAR_NLL_TERMS_BACKWARD
from msc.passes.forward_only import forward_only
from tests import models, zoo


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of the vocabulary or more on each rank, the last a shorter one."""
    monkeypatch.setattr(linear_loss, "LEAST_COLUMNS", 14)
    monkeypatch.setattr(linear_loss, "CPU_LOGITS_BYTES", 0)


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        return models.GPT(layers=2, width=32)
    return models.Llama(layers=4 if name == "four-layers" else 2, width=32)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"mesh": "tp=4", "recompute": "full"}),
    ("llama", {"mesh": "dp=2,tp=2", "microbatches": 2, "zero": 2, "recompute": "selective"}),
    ("gpt", {"mesh": "dp=2,tp=2", "microbatches": 2, "zero": 3}),
    ("gpt", {"mesh": "pp=2,dp=2,tp=2", "microbatches": 2}),
    ("four-layers", {"mesh": "pp=2", "microbatches": 4, "schedule": "zb-v"}),
    ("llama", {"mesh": "tp=2", "fuse_collectives": True}),
    ("gpt", {"mesh": "tp=2", "recompute": msc.MemoryBudget(900_000)}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_parity(name: str, options: dict[str, Any]) -> None:
    report = msc.verify(
        small(name), models.tokens(), dtype=torch.float64, fuse_loss=True, **options
    )
    assert report.ok, report.first_difference
    assert report.max_error < 1e-10
    assert not any("fuse_loss" in note for note in report.notes)


def test_collectives_of_a_fused_head_are_no_candidates_to_be_fused() -> None:
    program = msc.compile(
        small("gpt"), models.tokens(), mesh="tp=2", fuse_loss=True, fuse_collectives=True
    )
    found = [line for line in program.report.fused_collectives if "lm_head" in line]
    assert len(found) == 2  # the gather before it, and the reduce-scatter of its gradient
    assert all("left alone: the head is one op with its loss (fuse_loss)" in line for line in found)


def test_a_soft_cap() -> None:
    """That of Gemma 2, whose head is its embedding, as transformers has it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**zoo.LLAMA, **zoo.GROUPED, "num_hidden_layers": 1}
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)).train()
    batch = zoo.batch("gemma2")
    report = msc.verify(model, batch, mesh="tp=2", dtype=torch.float64, fuse_loss=True)
    assert report.ok, report.first_difference
    assert report.max_error < 1e-10
    assert not any("fuse_loss" in note for note in report.notes)


def test_mixed_precision_stays_near_and_sums_in_float32() -> None:
    options: dict[str, Any] = {"mesh": "tp=2", "microbatches": 2, "precision": "bf16-mixed"}
    plain, fused = (
        msc.compile(small("gpt"), models.tokens(), fuse_loss=fuse, **options)
        .run_virtual(models.tokens())
        .grads
        for fuse in (False, True)
    )
    assert plain.keys() == fused.keys()
    for name, gradient in plain.items():
        assert fused[name].dtype == torch.float32
        difference = (fused[name] - gradient).abs().max()
        assert difference <= 0.02 * gradient.abs().max()


def test_a_saved_program_is_the_same(tmp_path: Path) -> None:
    program = msc.compile(small("llama"), models.tokens(), mesh="tp=2", fuse_loss=True)
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert loaded.fingerprint == program.fingerprint
    assert loaded.report.fused_losses == program.report.fused_losses
    one, other = (each.run_virtual(models.tokens()) for each in (program, loaded))
    torch.testing.assert_close(other.grads, one.grads, rtol=0, atol=0)


def test_every_view_of_a_program_has_it(tmp_path: Path) -> None:
    """Flat graphs, dump, kernels, simulation; evaluation has no gradient."""
    options: dict[str, Any] = {"mesh": "tp=2", "precision": "bfloat16"}
    program = msc.compile(small("gpt"), models.tokens(), fuse_loss=True, **options)
    flat = [node.target for gm in program.graphs(0).values() for node in gm.graph.nodes]
    assert (flat.count(LINEAR_NLL_TERMS), flat.count(LINEAR_NLL_TERMS_BACKWARD)) == (1, 1)
    program.dump(tmp_path)
    (dumped,) = [path for path in tmp_path.rglob("*fuse-loss*")]
    assert "fuse-loss, lm_head: one op with its cross entropy" in dumped.read_text()
    lines = [line for line in program.kernels("sm_90").lines if "linear_nll_terms" in line]
    assert len(lines) == 2
    assert all("in lm_head: Triton, linear_cross_entropy_" in line for line in lines)
    plain = msc.compile(small("gpt"), models.tokens(), **options)
    assert program.report.model_flops == plain.report.model_flops
    # HFU counts the product that is made twice, MFU does not
    one, other = program.simulate("h100"), plain.simulate("h100")
    assert one.mfu is not None
    assert other.mfu is not None
    assert one.hfu / one.mfu > other.hfu / other.mfu
    evaluation = [
        node.target
        for gm in graphs_below(forward_only(program.rank_graph(0)))
        for node in gm.graph.nodes
    ]
    assert LINEAR_NLL_TERMS in evaluation
    assert LINEAR_NLL_TERMS_BACKWARD not in evaluation
