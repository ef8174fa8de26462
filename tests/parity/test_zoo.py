"""Every named architecture: all of it sharded where sizes divide, and exact where they do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import msc
from tests import zoo
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import check_sharded, step_errors

pytestmark = pytest.mark.usefixtures("capture_once")

MESHES = [
    ({"tp": 3}, 1),
    ({"pp": 3, "dp": 2}, 2),
    ({"pp": 2, "dp": 2, "tp": 2}, 3),
    ({"dp": 3}, 2),
    ({"dp": 2, "tp": 4}, 1),
]
"""Meshes with numbers of micro-batches; each model runs on one of them, in turn."""

CONTRASTIVE = ("clip",)
"""Models that compare samples: their loss is taken per micro-batch, and the report says so."""


@functools.cache
def model(name: str) -> nn.Module:
    return zoo.build(name)


def verified(name: str, mesh: dict[str, int], microbatches: int = 1) -> Any:
    report = msc.verify(
        model(name),
        zoo.batch(name),
        mesh=mesh,
        microbatches=microbatches,
        dtype=torch.float64,
        loss_fn=zoo.MODELS[name].loss_fn,
    )
    assert report.ok, report.first_difference
    return report


@pytest.mark.parametrize("name", zoo.MODELS)
def test_all_of_it_is_sharded(name: str) -> None:
    """Also against eager PyTorch."""
    report = verified(name, {"tp": 2})
    assert report.fallbacks == ()
    check_sharded(report.sharded, {"tp": 2})
    if name not in CONTRASTIVE:
        assert report.notes == ()


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [(name, *MESHES[i % len(MESHES)]) for i, name in enumerate(zoo.MODELS)],
)
def test_parity(name: str, mesh: dict[str, int], microbatches: int) -> None:
    program = msc.compile(
        model(name),
        zoo.batch(name),
        mesh=mesh,
        microbatches=microbatches,
        precision="float64",
        loss_fn=zoo.MODELS[name].loss_fn,
    )
    result = program.run_virtual(zoo.batch(name))
    loss, grads = expected(name, 1 if program.separable else microbatches)
    assert step_errors(program, result, loss, grads) == {}
    assert not any("no sharding rule" in line for line in program.report.fallbacks)


@functools.cache
def expected(name: str, microbatches: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the module itself, accumulated over that many parts of the batch."""
    module, batch = model(name), zoo.batch(name)
    loss_fn = zoo.MODELS[name].loss_fn or (lambda out: getattr(out, "loss", out))
    module.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for part in range(microbatches):
        own = {key: x.chunk(microbatches)[part] for key, x in batch.items()}
        loss = loss_fn(module(**own)) / microbatches
        torch.autograd.backward(loss)
        total = total + loss.detach()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return total, grads
