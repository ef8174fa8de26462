"""The evaluation graph gives the loss of the step, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import msc
from msc.ir import actions
from msc.ir.communication import graphs_below
from msc.passes.forward_only import forward_only
from msc.program import Program
from msc.runtime.virtual import VirtualExecutor
from tests import models


def evaluate(program: Program, batch: Any) -> torch.Tensor:
    graphs = [forward_only(graph) for graph in program.rank_graphs]
    ranks = range(program.mesh.size)
    executor = VirtualExecutor(program.mesh, lambda rank: graphs[program.class_of(rank)])
    inputs = [
        program.initial_state(rank).arguments(
            graphs[program.class_of(rank)], program.local_inputs(batch, rank)
        )
        for rank in ranks
    ]
    losses: list[torch.Tensor] = [result["loss"] for result in executor.run(inputs)]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return losses[0]


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        *((mesh, "1f1b") for mesh in ("", "tp=2", "pp=2,tp=2", "pp=4", "pp=2,dp=2")),
        ("pp=4", "gpipe"),
        ("pp=2", "interleaved"),
        ("pp=2,tp=2", "zb-h1"),
        ("pp=2,dp=2", "zb-v"),
    ],
)
def test_the_loss_is_that_of_the_step(mesh: str, schedule: str) -> None:
    program = msc.compile(
        models.build("nanogpt"),
        models.batch("nanogpt"),
        mesh=mesh,
        microbatches=2,
        schedule=schedule,
        optimizer=msc.AdamW(),
    )
    before = [str(graph.graph) for graph in program.rank_graphs]
    found = evaluate(program, models.batch("nanogpt", 1))
    assert torch.equal(found, program.run_virtual(models.batch("nanogpt", 1)).loss)
    assert [str(graph.graph) for graph in program.rank_graphs] == before


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for graph in graphs_below(gm) for node in graph.graph.nodes]


def test_no_backward_no_optimizer_no_dropout() -> None:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=2, dropout=0.5)
    program = msc.compile(
        model, models.tokens(), mesh="pp=2", optimizer=msc.AdamW(), precision="float64"
    )
    dropout = torch.ops.msc.dropout.default
    for stage, graph in enumerate(program.rank_graphs):
        assert dropout in targets(graph)
        found = forward_only(graph)
        calls = [node.target for node in found.graph.nodes if node.op == "call_module"]
        assert [t for t in calls if t != "prologue"] == [f"chunk{stage}_forward"]
        assert not {dropout, actions.adam} & set(targets(found))
        kinds = {n.meta["kind"] for n in found.graph.find_nodes(op="placeholder")}
        assert not kinds & {"optimizer", "step"}
    model.double().eval()
    with torch.no_grad():
        expected = model(*models.tokens())
    torch.testing.assert_close(evaluate(program, models.tokens()), expected, rtol=1e-10, atol=0)
