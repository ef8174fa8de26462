"""bf16-mixed: computed in bfloat16; parameters, moments, sums and reductions in float32."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import msc
from msc.ir import actions
from msc.program import Program
from msc.verification import largest, relative_error
from tests import models

ADAMW = msc.AdamW(lr=1e-4, weight_decay=0.1, max_norm=1.0)
MESHES = ["tp=2", "dp=2", "pp=3", "pp=3,dp=2,tp=2"]
REDUCE = torch.ops._c10d_functional.all_reduce.default


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return models.GPT(width=24, layers=3, heads=6)


@functools.cache
def compiled(mesh: str, precision: str = "bf16-mixed", microbatches: int = 4) -> Program:
    return msc.compile(
        model(),
        models.tokens(),
        mesh=mesh,
        microbatches=microbatches,
        precision=precision,
        optimizer=ADAMW,
    )


def train(program: Program, steps: int) -> dict[str, Tensor]:
    state = None
    for step in range(steps):
        result = program.run_virtual(models.tokens(step), state)
        state = result.state
    return result.params


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_computes_what_one_rank_does(mesh: str) -> None:
    """Within the rounding of bfloat16, which other shapes place elsewhere."""
    found, expected = (compiled(m).run_virtual(models.tokens()) for m in (mesh, ""))
    scale = largest(expected.grads.values())
    assert found.loss.dtype == torch.float32
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-2)
    for name, gradient in expected.grads.items():
        assert found.grads[name].dtype == torch.float32
        assert relative_error(found.grads[name], gradient, scale, 0.05) <= 5e-2, name
    report = msc.verify(model(), models.tokens(), mesh=mesh, precision="bf16-mixed")
    assert report.ok, report.first_difference
    assert report.tolerance > 1e-3


def values(graph: fx.GraphModule, kind: str) -> list[Tensor]:
    nodes = graph.graph.find_nodes(op="placeholder")
    return [n.meta["val"] for n in nodes if n.meta["kind"] == kind]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_types_say_what_is_in_which_precision(mesh: str) -> None:
    program = compiled(mesh)
    for stage, graph in enumerate(program.rank_graphs):
        for kind in ("parameter", "optimizer"):
            assert {value.dtype for value in values(graph, kind)} == {torch.float32}
        reduced = graph.graph.find_nodes(op="call_function", target=REDUCE)
        assert {n.meta["val"].dtype for n in reduced} <= {torch.float32, torch.float64}
        assert bool(reduced) == (mesh != "")
        (step,) = [n for n in graph.graph.nodes if n.target is actions.adam]
        gradients: Any = step.args[1]
        assert {n.meta["val"].dtype for n in gradients} == {torch.float32}
        converted = [n for n in graph.graph.nodes if n.target is torch.ops.aten.to.dtype]
        assert len(converted) == len(values(graph, "parameter"))  # once a step, not a micro-batch
        first = program.mesh.rank({"pp": stage} if "pp=" in mesh else {})
        forward = program.graphs(first)["forward"]
        assert {value.dtype for value in values(forward, "parameter")} == {torch.bfloat16}


def test_the_sum_over_micro_batches_is_in_float32() -> None:
    """Each micro-batch's gradient is rounded to bfloat16, their sum is not."""
    grads = compiled("", microbatches=8).run_virtual(models.tokens()).grads
    rounded = [name for name, g in grads.items() if torch.equal(g, g.bfloat16().float())]
    assert not rounded


def test_master_weights_follow_float32_where_bfloat16_does_not() -> None:
    """Steps of 1e-4 are below the spacing of bfloat16 around most weights."""
    start = compiled("", "float32").state_dict()
    exact, mixed, low = (
        train(compiled("", precision), 20) for precision in ("float32", "bf16-mixed", "bfloat16")
    )
    moved = {name: (exact[name] - start[name]).norm() for name in exact}
    errors = {
        kind: [
            float((found[name].float() - exact[name]).norm() / moved[name])
            for name in exact
            if moved[name] > 0
        ]
        for kind, found in (("mixed", mixed), ("low", low))
    }
    assert all(value.dtype == torch.float32 for value in mixed.values())
    # not the worst: the bias of the keys has no gradient but rounding, which Adam makes large
    middle = {kind: statistics.median(found) for kind, found in errors.items()}
    assert middle["mixed"] < 0.05, middle
    assert middle["mixed"] < 0.1 * middle["low"], middle


def test_a_saved_program_and_the_trainer(tmp_path: Path) -> None:
    program = compiled("")
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    expected = train(program, 2)
    data = [models.tokens(step) for step in range(2)]
    with msc.Trainer(loaded, data, log=False) as trainer:
        assert torch.equal(trainer.state_dict()["wpe.weight"], model().wpe.weight)  # type: ignore
        trainer.fit(2)
        found = trainer.state_dict()
        moments = trainer.optimizer_state_dict()["first_moment"]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {value.dtype for value in (*found.values(), *moments.values())} == {torch.float32}


def test_bfloat16_is_bfloat16_throughout() -> None:
    (graph,) = compiled("", "bfloat16").rank_graphs
    for kind in ("parameter", "optimizer"):
        assert {value.dtype for value in values(graph, kind)} == {torch.bfloat16}
