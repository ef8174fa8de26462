"""A checkpoint of any mesh is loaded by any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.checkpoint.program_state import state_tensors
from msc.runtime.checkpoint.storage import LocalStorage
from msc.runtime.state import RankState
from tests import models
from tests.checkpoint.job import tokens
from tests.checkpoint.runs import ADAMW
from tests.runtime.checkpoint import worlds


class Normed(nn.Module):
    """Batch norm: a state that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.first(x)))
        return functional.cross_entropy(self.last(hidden), y)


def normed_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def gpt() -> nn.Module:
    return models.GPT(vocabulary=97, width=16, heads=2, layers=4, dropout=0.1)


# Adam would make steps of what rounding leaves of the gradient of a bias before a norm.
SGD = msc.SGD(lr=0.1, momentum=0.9)

CASES: dict[str, tuple[Any, Any, Any, list[dict[str, Any]]]] = {
    "tied and fused, of an odd size": (
        gpt,
        tokens,
        ADAMW,
        [
            {"mesh": "pp=2,tp=2", "microbatches": 2},
            {"mesh": "dp=2", "microbatches": 1},
            {
                "mesh": "pp=2",
                "microbatches": 2,
                "schedule": "interleaved",
                "virtual_stages": 2,
            },
            {"mesh": "dp=2,tp=2", "microbatches": 1},
            {"mesh": "dp=4", "microbatches": 2, "zero": 1},
            {"mesh": "dp=4,tp=2", "microbatches": 1, "zero": 3, "shard_group": 2},
        ],
    ),
    "buffers": (Normed, normed_batch, SGD, [{"mesh": "tp=2"}, {"mesh": "dp=4"}, {"mesh": ""}]),
}


@pytest.mark.parametrize("case", CASES)
def test_any_mesh_to_any_mesh(tmp_path: Path, case: str) -> None:
    build, batch, optimizer, options = CASES[case]
    torch.manual_seed(0)
    model = build()
    storage = LocalStorage(tmp_path)
    programs = [
        msc.compile(model, batch(0), optimizer=optimizer, precision="float64", **each)
        for each in options
    ]
    reference: list[RankState] | None = None
    state: list[RankState] | None = None
    step = 0
    # each program goes on from the one before it, beside the first, which is not interrupted
    for number, current in enumerate([*programs, programs[0]]):
        if number:
            states = state_tensors(current)
            state = [current.initial_state(rank) for rank in range(current.mesh.size)]
            reports = worlds.load_states(storage, f"step-{step:08d}-aa", states, state)
            assert not any(report.damage for report in reports)
            for each in state:
                each.step = step
        for _ in range(2):
            expected = programs[0].run_virtual(batch(step), reference)
            found = current.run_virtual(batch(step), state)
            reference, state = expected.state, found.state
            step += 1
            assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-12)
        for name, value in expected.params.items():
            torch.testing.assert_close(found.params[name], value, rtol=1e-10, atol=1e-12)
        for name, value in expected.buffers.items():
            torch.testing.assert_close(found.buffers[name], value, rtol=1e-10, atol=1e-12)
        assert state is not None
        worlds.write(storage, state_tensors(current), state, step)
