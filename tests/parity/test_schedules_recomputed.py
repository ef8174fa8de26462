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


def trained(program: Program) -> StepResult:
    """Two steps."""
    first = program.run_virtual(BATCH, seed=3)
    return program.run_virtual(BATCH, first.state, seed=3)


@functools.cache
def on_one_rank() -> StepResult:
    return trained(compiled(""))


def assert_parity(program: Program) -> None:
    loss, grads = Reference(program, model(), BATCH, {"rewrites": [msc.ParallelBlock()]}).run(BATCH)
    assert step_errors(program, program.run_virtual(BATCH), loss, grads) == {}
    expected, found = on_one_rank(), trained(program)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.grad_norm, expected.grad_norm, rtol=1e-10, atol=0)
    assert parameter_errors(found.params, expected.params) == {}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2,tp=2", {**INTERLEAVED, "recompute": "full"}),
        ("pp=2,dp=2", {"schedule": "zb-h1", "recompute": "full"}),
        ("pp=2,tp=2", {"schedule": "zb-v", "recompute": "selective"}),
        ("pp=2", {"schedule": "auto", "recompute": "full"}),
    ],
)
def test_what_is_trained_is_what_one_rank_trains(mesh: str, options: dict[str, Any]) -> None:
    program = compiled(mesh, **options)
    assert len(program.report.rewrites) == 4
    assert not any("left alone" in line for line in program.report.rewrites)
    assert_parity(program)


def test_a_saved_program(tmp_path: Path) -> None:
    compiled("pp=2", **INTERLEAVED, recompute="full").save(tmp_path)
    assert_parity(msc.load(tmp_path))


@pytest.mark.parametrize("schedule", [INTERLEAVED, {"schedule": "zb-v"}])
def test_a_budget_chooses_for_all_chunks_of_a_stage(schedule: dict[str, Any]) -> None:
    most = compiled("pp=2", **schedule).memory_bytes()
    budget = 19 * max(most) // 20
    program = compiled("pp=2", **schedule, recompute=msc.MemoryBudget(budget))
    assert max(program.memory_bytes()) <= budget
    assert_parity(program)


def test_a_split_backward_keeps_what_it_recomputes() -> None:
    with pytest.raises(msc.PlanError, match="'1f1b', whose backward is not split"):
        compiled("pp=2", schedule="zb-h1", recompute=msc.MemoryBudget(1000))
