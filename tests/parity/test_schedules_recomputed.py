"""Schedules with recomputation, rewrites and an optimizer that needs whole parameters' norms."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import msc
from msc.program import Program
from msc.step_result import StepResult
from msc.verification import Reference
from tests import models
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import parameter_errors, step_errors

pytestmark = pytest.mark.usefixtures("capture_once")

MICRO_BATCHES = 4
BATCH = models.tokens(samples=8, length=8)
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}


@functools.cache
def model() -> models.GPT:
    torch.manual_seed(0)
    return models.GPT(width=16, heads=2, layers=4, vocabulary=96, length=8, dropout=0.1)


def compiled(mesh: str, **options: Any) -> Program:
    return msc.compile(
        model(),
        BATCH,
        mesh=mesh,
        microbatches=MICRO_BATCHES,
        precision="float64",
        rewrites=[msc.ParallelBlock()],
        optimizer=msc.LAMB(lr=1e-2, max_norm=0.1),
        **options,
    )


def trained(program: Program) -> tuple[StepResult, StepResult]:
    """Two steps."""
    first = program.run_virtual(BATCH, seed=3)
    return first, program.run_virtual(BATCH, first.state, seed=3)


@functools.cache
def expected() -> tuple[torch.Tensor, dict[str, torch.Tensor], StepResult]:
    """Loss and gradients of the first step on one device, and the second step on one rank."""
    program = compiled("")
    reference = Reference(program, model(), BATCH, {"rewrites": [msc.ParallelBlock()]})
    return *reference.run(BATCH, seed=3), trained(program)[1]


def assert_parity(program: Program) -> None:
    loss, grads, last = expected()
    first, second = trained(program)
    assert step_errors(program, first, loss, grads) == {}
    torch.testing.assert_close(second.loss, last.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(second.grad_norm, last.grad_norm, rtol=1e-10, atol=0)
    assert parameter_errors(second.params, last.params) == {}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2,tp=2", {**INTERLEAVED, "recompute": "full"}),
        ("pp=2,dp=2", {"schedule": "zb-h1", "recompute": "full"}),
        ("pp=2,tp=2", {"schedule": "zb-v", "recompute": "selective"}),
        ("pp=2", {"schedule": "auto", "recompute": "full"}),
    ],
)
def test_a_saved_program_trains_as_one_rank_does(
    mesh: str, options: dict[str, Any], tmp_path: Path
) -> None:
    compiled(mesh, **options).save(tmp_path)
    program = msc.load(tmp_path)
    assert len(program.report.rewrites) == 4
    assert not any("left alone" in line for line in program.report.rewrites)
    assert_parity(program)


def test_a_budget_chooses_for_all_chunks_of_a_stage() -> None:
    most = compiled("pp=2", **INTERLEAVED).memory_bytes()
    budget = 19 * max(most) // 20
    program = compiled("pp=2", **INTERLEAVED, recompute=msc.MemoryBudget(budget))
    assert max(program.memory_bytes()) <= budget
    assert_parity(program)


def test_a_split_backward_keeps_what_it_recomputes() -> None:
    with pytest.raises(msc.PlanError, match="'1f1b', whose backward is not split"):
        compiled("pp=2", schedule="zb-h1", recompute=msc.MemoryBudget(1000))
