"""Global-norm clipping: torch's own on one device, and the same on every mesh."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import msc
from msc.ir import actions
from msc.program import Program
from msc.step_result import StepResult
from msc.verification import Reference
from tests import models
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import parameter_errors
from tests.test_trainer import run_job
from tests.training_job import batches

pytestmark = pytest.mark.usefixtures("capture_once")

MESHES = ["tp=2", "tp=3", "dp=2", "pp=2", "pp=3,tp=2", "pp=2,dp=2,tp=2"]
STEPS = 3
RATE = msc.LearningRate.constant(1e-2, warmup=2)
MAX_NORM = 0.05
"""Far below the norm of any step, so that every one is clipped."""


@functools.cache
def model(frozen_head: bool = False) -> nn.Module:
    """Biases and norms that tp replicates, a tied weight on the first and last stage."""
    torch.manual_seed(0)
    found = models.GPT(width=24, layers=3, heads=6)
    if frozen_head:  # a stage with nothing to train
        found.lm_head.weight = nn.Parameter(found.wte.weight.detach().clone())
        for part in (found.h[2], found.ln_f, found.lm_head):
            part.requires_grad_(False)
    return found


def compiled(mesh: str, max_norm: float | None, frozen_head: bool = False) -> Program:
    return msc.compile(
        model(frozen_head),
        models.tokens(),
        mesh=mesh,
        microbatches=2,
        precision="float64",
        optimizer=msc.AdamW(lr=1e-2, weight_decay=0.1, max_norm=max_norm),
    )


def steps(program: Program) -> list[StepResult]:
    found: list[StepResult] = []
    for seed in range(STEPS):
        state = found[-1].state if found else None
        found.append(program.run_virtual(models.tokens(seed), state))
    return found


def trained_by_torch(frozen_head: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """The norms of all steps and the last parameters, by clip_grad_norm_ and torch's AdamW."""
    program = msc.compile(model(frozen_head), models.tokens(), precision="float64")
    reference = Reference(program, model(frozen_head), models.tokens(), {})
    values = {n: nn.Parameter(program.read_parameter(n).clone()) for n in program.parameters}
    trained = {n: values[n] for n, layout in program.parameters.items() if layout.trainable}
    optimizer = torch.optim.AdamW(list(trained.values()), lr=1e-2, weight_decay=0.1)
    norms = []
    for seed in range(STEPS):
        _, grads = reference.run(models.tokens(seed), values)
        for name, value in trained.items():
            value.grad = grads[name]
        norms.append(float(nn.utils.clip_grad_norm_(list(trained.values()), MAX_NORM)))
        optimizer.step()
    return norms, {name: value.detach() for name, value in values.items()}


@pytest.mark.parametrize("frozen_head", [False, True])
def test_one_rank_equals_torch(frozen_head: bool) -> None:
    norms, params = trained_by_torch(frozen_head)
    assert min(norms) > 2 * MAX_NORM
    found = steps(compiled("", MAX_NORM, frozen_head))
    assert [float(step.grad_norm) for step in found if step.grad_norm is not None] == pytest.approx(
        norms, rel=1e-12
    )
    assert parameter_errors(found[-1].params, params, 1e-12) == {}


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_equals_torch(mesh: str, frozen_head: bool) -> None:
    """Shards are summed, what is replicated or tied over stages counts once."""
    norms, params = trained_by_torch(frozen_head)
    found = steps(compiled(mesh, MAX_NORM, frozen_head))
    assert [float(step.grad_norm) for step in found if step.grad_norm is not None] == pytest.approx(
        norms, rel=1e-10
    )
    # Adam divides by the root of the second moment, which magnifies the rounding of small gradients
    assert parameter_errors(found[-1].params, params, 1e-8) == {}


def all_reduces(graph: fx.GraphModule) -> list[fx.Node]:
    target = torch.ops._c10d_functional.all_reduce.default
    return graph.graph.find_nodes(op="call_function", target=target)


def test_one_number_is_reduced_once() -> None:
    program = compiled("pp=2,dp=2,tp=2", MAX_NORM)
    without = compiled("pp=2,dp=2,tp=2", None)
    for more, fewer in zip(program.rank_graphs, without.rank_graphs, strict=True):
        assert len(all_reduces(more)) == len(all_reduces(fewer)) + 1
    for graph in program.rank_graphs:
        (norm,) = [n for n in graph.graph.nodes if n.target is actions.squared_norm]
        (start,) = norm.users
        assert start.args[1:] == ("sum", "pp,tp")
        assert (start.meta["val"].shape, start.meta["val"].dtype) == ((), torch.float64)


def test_gradients_below_the_bound_are_left_alone() -> None:
    plain, clipped = steps(compiled("tp=2", None)), steps(compiled("tp=2", math.inf))
    assert plain[-1].grad_norm is None
    for name, value in plain[-1].params.items():
        assert torch.equal(value, clipped[-1].params[name])
    squares = sum(float(grad.square().sum()) for grad in clipped[0].grads.values())
    norm = clipped[0].grad_norm
    assert norm is not None
    assert float(norm) == pytest.approx(math.sqrt(squares), rel=1e-12)


def test_the_trainer_tells_the_norms(tmp_path: Path) -> None:
    norms, params = trained_by_torch()
    compiled("", MAX_NORM).save(tmp_path)
    data = [models.tokens(seed) for seed in range(STEPS)]
    with msc.Trainer(msc.load(tmp_path), data, log=False) as trainer:
        trainer.fit(STEPS)
        assert trainer.grad_norms == pytest.approx(norms, rel=1e-12)
        assert parameter_errors(trainer.state_dict(), params, 1e-12) == {}


@pytest.mark.gloo
def test_processes_reduce_the_norms(tmp_path: Path) -> None:
    cases = {
        "nanogpt.tp": ("tp=2", msc.LAMB(lr=RATE, weight_decay=0.1, max_norm=MAX_NORM)),
        "nanogpt.pp": ("pp=2", msc.AdamW(lr=RATE, weight_decay=0.1, max_norm=MAX_NORM)),
    }
    programs = {
        case: msc.compile(
            models.build("nanogpt"),
            models.batch("nanogpt"),
            mesh=mesh,
            microbatches=2,
            precision="float64",
            optimizer=optimizer,
        )
        for case, (mesh, optimizer) in cases.items()
    }
    for case, program in programs.items():
        program.save(tmp_path / case)
    run_job(tmp_path, 2, list(cases))
    for case, program in programs.items():
        found = torch.load(tmp_path / f"{case}.pt")
        state, norms = None, []
        for batch in batches("nanogpt"):
            result = program.run_virtual(batch, state)
            state = result.state
            assert result.grad_norm is not None
            norms.append(float(result.grad_norm))
        assert found["grad_norms"] == pytest.approx(norms, rel=1e-12)
        assert found["learning_rates"] == pytest.approx([5e-3, 1e-2, 1e-2], rel=1e-12)
        assert parameter_errors(found["params"], program.state_dict(result), 1e-9) == {}


@pytest.mark.parametrize("bound", [math.inf, 1.0, None])
def test_a_saved_program_keeps_its_bound(tmp_path: Path, bound: float | None) -> None:
    compiled("pp=2", bound).save(tmp_path)
    assert msc.load(tmp_path).optimizer == msc.AdamW(lr=1e-2, weight_decay=0.1, max_norm=bound)


@pytest.mark.parametrize("bound", [0, -1.0, math.nan, "1", True])
def test_a_bound_that_is_none_is_refused(bound: Any) -> None:
    with pytest.raises(msc.PlanError, match="AdamW: max_norm is"):
        msc.AdamW(max_norm=bound)
