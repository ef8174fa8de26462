"""Dropout: a training run drops the same elements on every mesh, schedule and micro-batch count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import msc
from msc.program import Program
from tests import models
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import parameter_errors

pytestmark = pytest.mark.usefixtures("capture_once")

STEPS = 3


def compiled(model: models.GPT, mesh: str, **options: Any) -> Program:
    return msc.compile(
        model,
        models.tokens(),
        mesh=mesh,
        optimizer=msc.AdamW(lr=1e-3, max_norm=1.0),
        precision="float64",
        **options,
    )


def train(program: Program, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    state = None
    losses = []
    for step in range(STEPS):
        result = program.run_virtual(models.tokens(step), state, seed=seed)
        state = result.state
        losses.append(float(result.loss))
    return losses, result.params


def test_a_run_on_a_mesh_is_the_run_on_one_rank() -> None:
    torch.manual_seed(0)
    model = models.GPT(width=24, layers=4, heads=6, dropout=0.1)
    losses, params = train(compiled(model, ""), seed=11)
    for mesh, options in (
        ("pp=2,dp=2,tp=2", {"microbatches": 2}),
        ("pp=2,dp=2,tp=2", {"microbatches": 4, "schedule": "gpipe"}),
        ("tp=3", {"microbatches": 8}),
        ("pp=4", {}),
    ):
        found, trained = train(compiled(model, mesh, **options), seed=11)
        assert found == pytest.approx(losses, rel=1e-10), (mesh, options)
        assert parameter_errors(trained, params) == {}, (mesh, options)
    other, _ = train(compiled(model, ""), seed=12)
    assert other[0] != pytest.approx(losses[0], rel=1e-4)
