"""Every named model on every mesh: loss, gradients, and parameters after 20 optimizer steps."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.program import Program
from msc.verification import Reference
from tests import models
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import check_sharded, parameter_errors, step_errors

MESHES = [
    *({"pp": pp, "dp": dp, "tp": tp} for pp, dp, tp in itertools.product((1, 2), repeat=3)),
    {"tp": 4},
    {"pp": 4},
]
STEPS = 20
LONG = "MSC_TEST_LONG" in os.environ  # set by `make test-long`
MESHES_OF_20_STEPS = MESHES if LONG else [{"pp": 2, "dp": 2, "tp": 2}, {"tp": 4}, {"pp": 4}]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
ADAMW = msc.AdamW(**OPTIONS)


def mesh_name(mesh: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in mesh.items())


@functools.cache
def model(name: str) -> nn.Module:
    return models.build(name)


def compiled(name: str, mesh: dict[str, int], microbatches: int) -> Program:
    return msc.compile(
        model(name),
        models.batch(name),
        mesh=mesh,
        microbatches=microbatches,
        optimizer=ADAMW,
        precision="float64",
    )


class Single:
    """The single-device program of a model: its first step, and its parameters after 20.

    The captured graph runs in float64 throughout; transformers' modules would cast to float32.
    """

    def __init__(self, name: str) -> None:
        program = msc.compile(model(name), models.batch(name), precision="float64")
        reference = Reference(program, model(name), models.batch(name), {})
        self.loss, self.grads = reference.run(models.batch(name))
        values = {n: program.read_parameter(n).clone() for n in program.parameters}
        parameters = {n: nn.Parameter(value) for n, value in values.items()}
        optimizer = torch.optim.AdamW(parameters.values(), **OPTIONS)
        for step in range(STEPS):
            _, grads = reference.run(models.batch(name, step), parameters, step=step)
            for parameter_name, parameter in parameters.items():
                parameter.grad = grads.get(parameter_name)
            optimizer.step()
        self.final = {n: parameter.detach() for n, parameter in parameters.items()}


single = functools.cache(Single)


@pytest.mark.usefixtures("capture_once")
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", MESHES, ids=mesh_name)
@pytest.mark.parametrize("name", models.BUILDERS)
def test_parity(name: str, mesh: dict[str, int], microbatches: int) -> None:
    program = compiled(name, mesh, microbatches)
    report = program.report
    check_sharded(report.sharded, mesh)
    assert (report.fallbacks, report.notes) == ((), ())
    expected = single(name)
    result = program.run_virtual(models.batch(name))
    assert step_errors(program, result, expected.loss, expected.grads) == {}
    # Later steps run the same graphs: on every mesh for one model, on the largest for the others.
    many = LONG or microbatches == 2
    if many and (name == "nanogpt" or mesh in MESHES_OF_20_STEPS):
        for step in range(1, STEPS):
            result = program.run_virtual(models.batch(name, step), result.state)
        assert parameter_errors(result.params, expected.final) == {}
        # A bias of keys has no gradient, since softmax does not see it; all else has moved far.
        moved = parameter_errors(result.params, initial(program), tolerance=0.01)
        still = program.parameters.keys() - moved.keys()
        assert {name for name in still if not name.endswith("key.bias")} == set()


def initial(program: Program) -> dict[str, Tensor]:
    return {name: program.read_parameter(name) for name in program.parameters}


@pytest.mark.parametrize("name", models.HAND_WRITTEN)
def test_the_reference_is_the_plain_model(name: str) -> None:
    """Eager PyTorch and torch.optim.AdamW, in float64, without any part of MSC."""
    plain = models.build(name).double()
    optimizer = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = plain(*models.batch(name, step))
        loss.backward()
        optimizer.step()
        if step == 0:
            assert float((loss.detach() - single(name).loss).abs()) <= 1e-12
    final: dict[str, Any] = dict(plain.named_parameters())
    assert parameter_errors(single(name).final, {n: final[n].detach() for n in final}) == {}


@pytest.mark.parametrize("name", models.BUILDERS)
def test_verify(name: str) -> None:
    """The same through msc.verify, which also compares the captured graph with eager."""
    options: dict[str, Any] = {"mesh": "pp=2,dp=2,tp=2", "microbatches": 2}
    report = msc.verify(model(name), models.batch(name), dtype=torch.float64, **options)
    assert report.ok, report.first_difference
    assert report.first_difference == ""
    assert report.loss_error <= 1e-10
    assert max(report.grad_errors.values()) <= 1e-10
    trainable = [n for n, p in model(name).named_parameters() if p.requires_grad]
    assert set(trainable) == set(report.grad_errors)
    assert set(report.eager_errors) == {"loss", *trainable}
