"""Every named architecture: all of it sharded where sizes divide, and exact where they do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import msc
from msc.verification import Reference
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
"""Meshes with numbers of micro-batches; every second model runs on one of them, in turn."""

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
    [(name, *MESHES[i % len(MESHES)]) for i, name in enumerate([*zoo.MODELS][1::2])],
)
def test_parity(name: str, mesh: dict[str, int], microbatches: int) -> None:
    batch = zoo.batch(name)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches}
    options |= {"loss_fn": zoo.MODELS[name].loss_fn}
    program = msc.compile(model(name), batch, precision="float64", **options)
    loss, grads = Reference(program, model(name), batch, options).run(batch)
    assert step_errors(program, program.run_virtual(batch), loss, grads) == {}
    assert not any("no sharding rule" in line for line in program.report.fallbacks)
