"""Random small transformers on random meshes: never a wrong number, never a silent fallback."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msc
from msc.testing import TransformerConfig
from msc.verification import Reference, VerifyReport
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import check_sharded, step_errors

pytestmark = pytest.mark.usefixtures("capture_once")

SLOW = settings(
    deadline=None,
    derandomize=True,  # the same examples in every run of CI
    suppress_health_check=list(HealthCheck),
)


def usable(mesh: msc.Mesh, layers: int) -> msc.Mesh:
    """The mesh with no more stages than layers, which would be refused."""
    pp = min(mesh.axis_size("pp"), layers)
    return msc.Mesh(tuple((name, pp if name == "pp" else size) for name, size in mesh))


def samples_for(mesh: msc.Mesh, microbatches: int) -> int:
    return mesh.axis_size("dp") * microbatches


@settings(SLOW, max_examples=20)
@given(
    config=msc.testing.transformer_configs(dropout=True),
    drawn=msc.testing.meshes(max_ranks=8),
    microbatches=msc.testing.micro_batches(3),
    rows=st.integers(1, 2),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_any_sizes(
    config: TransformerConfig, drawn: msc.Mesh, microbatches: int, rows: int, schedule: str
) -> None:
    """Sizes that tp does not divide are split unevenly, or stay whole, which the report says."""
    mesh = usable(drawn, config.layers)
    model = msc.testing.Transformer(config)
    batch = msc.testing.transformer_batch(config, rows * samples_for(mesh, microbatches))
    program = msc.compile(
        model, batch, mesh=mesh, microbatches=microbatches, schedule=schedule, precision="float64"
    )
    result = program.run_virtual(batch, seed=5)
    loss, grads = Reference(program, model, batch, {}).run(batch, seed=5)
    assert step_errors(program, result, loss, grads) == {}
    tp = mesh.axis_size("tp")
    if tp > 1 and program.report.sharded["tp"]["flops"] < 0.5:
        assert program.report.fallbacks
    for line in program.report.fallbacks:
        assert "runs whole on every tp rank" in line


@settings(SLOW, max_examples=10)
@given(
    config=msc.testing.transformer_configs(divisible=True),
    drawn=msc.testing.meshes(max_ranks=8, tp=4),
    microbatches=msc.testing.micro_batches(2),
)
def test_sizes_that_divide_are_sharded(
    config: TransformerConfig, drawn: msc.Mesh, microbatches: int
) -> None:
    mesh = usable(drawn, config.layers)
    if mesh.axis_size("tp") == 3:
        mesh = msc.Mesh(tuple((name, 2 if name == "tp" else size) for name, size in mesh))
    model = msc.testing.Transformer(config)
    batch = msc.testing.transformer_batch(config, samples_for(mesh, microbatches))
    program = msc.compile(model, batch, mesh=mesh, microbatches=microbatches, precision="float64")
    result = program.run_virtual(batch)
    loss, grads = Reference(program, model, batch, {}).run(batch)
    assert step_errors(program, result, loss, grads) == {}
    assert program.report.fallbacks == ()
    check_sharded(program.report.sharded, {"dp": mesh.axis_size("dp")})
    if mesh.axis_size("tp") > 1:
        assert program.report.sharded["tp"]["flops"] >= 0.95


@settings(SLOW, max_examples=4)
@given(config=msc.testing.transformer_configs(dropout=True), mesh=msc.testing.meshes(4, pp=1))
def test_verify_agrees_about_them(config: TransformerConfig, mesh: msc.Mesh) -> None:
    batch = msc.testing.transformer_batch(config, samples_for(mesh, 2))
    model = msc.testing.Transformer(config)
    report: VerifyReport = msc.verify(model, batch, mesh=mesh, microbatches=2, dtype=torch.float64)
    assert report.ok, report.first_difference
    assert math.isfinite(report.loss)
