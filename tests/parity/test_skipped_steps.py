"""A step whose gradients are not finite changes nothing, on no rank, and is counted."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.ir.optimizer import Optimizer
from msc.program import Program
from msc.runtime.state import RankState
from tests.parity.captures import capture_once as capture_once

pytestmark = pytest.mark.usefixtures("capture_once")

RATE = msc.LearningRate.linear(0.1, steps=6, warmup=2)
SPECS: dict[str, Optimizer] = {
    "adamw": msc.AdamW(lr=RATE, weight_decay=0.1, skip_nonfinite=True),
    "adam": msc.Adam(lr=RATE, weight_decay=0.1, max_norm=1.0),
    "sgd": msc.SGD(lr=RATE, skip_nonfinite=True),
    "momentum": msc.SGD(RATE, 0.9, 0.3, weight_decay=0.1, skip_nonfinite=True),
    "nesterov": msc.SGD(0.1, 0.9, nesterov=True, max_norm=1.0),
    "lamb": msc.LAMB(lr=RATE, eps=0.0, max_norm=1.0),
}
BAD = -1


class Layers(nn.Module):
    """Linear layers with biases; an infinite input makes gradients that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().sum(-1).mean()


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


def batch(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(abs(seed))
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    if seed == BAD:
        x[5, 2] = math.inf  # in the second half of the batch: one rank of dp=2 sees it alone
    return (x,)


def compiled(spec: Optimizer, mesh: str = "") -> Program:
    return msc.compile(model(), batch(0), mesh=mesh, microbatches=2, optimizer=spec)


def trained(program: Program, seeds: list[int]) -> list[RankState]:
    state = None
    for seed in seeds:
        state = program.run_virtual(batch(seed), state).state
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("name", "mesh"), [*((name, "") for name in SPECS), ("momentum", "pp=2,dp=2"), ("lamb", "tp=2")]
)
def test_training_goes_on_as_if_the_step_had_not_been(name: str, mesh: str) -> None:
    """The first step is skipped, and a later one: bias correction, momentum and rate count anew."""
    program = compiled(SPECS[name], mesh)
    found = trained(program, [BAD, 1, 2, BAD, 3])
    expected = trained(program, [1, 2, 3])
    for have, want in zip(found, expected, strict=True):
        assert (have.step, int(have.skipped)) == (5, 2)
        assert (want.step, int(want.skipped)) == (3, 0)
        for left, right in ((have.parameters, want.parameters), (have.moments, want.moments)):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in right)
            assert all(value.isfinite().all() for value in left.values())


def test_what_a_step_tells() -> None:
    program = compiled(SPECS["lamb"], "tp=2")
    first = program.run_virtual(batch(BAD))
    second = program.run_virtual(batch(1), first.state)
    third = program.run_virtual(batch(2), second.state)
    told = [(each.skipped, each.learning_rate, each.grad_norm) for each in (first, second, third)]
    counts, rates, norms = ([float(value or 0) for value in row] for row in zip(*told, strict=True))
    assert counts == [1, 1, 1]
    assert rates == [0.05, 0.05, 0.1]
    assert [math.isfinite(norm) for norm in norms] == [False, True, True]


def test_where_steps_are_skipped() -> None:
    """Where the norm is there anyway, unless the user says otherwise."""
    assert msc.AdamW(max_norm=1.0).skips
    assert not msc.AdamW().skips
    assert not msc.AdamW(max_norm=1.0, skip_nonfinite=False).skips
    without = compiled(msc.AdamW(max_norm=1.0, skip_nonfinite=False))
    result = without.run_virtual(batch(BAD))
    assert result.skipped is None
    assert result.params["layers.0.weight"].isnan().any()


def test_the_trainer_counts_and_says_so(tmp_path: Path) -> None:
    compiled(SPECS["momentum"]).save(tmp_path)
    lines: list[str] = []
    data = [batch(seed) for seed in (1, BAD, 2)]
    with msc.Trainer(msc.load(tmp_path), data, log=lines.append) as trainer:
        trainer.fit(3)
        assert (trainer.step, trainer.skipped_steps) == (3, 1)
        assert trainer.learning_rates == [0.05, 0.1, 0.1]
        state = trainer.optimizer_state_dict()
        assert state["step"] == 2
        expected = trained(compiled(SPECS["momentum"]), [1, 2])[0]
        for name, value in trainer.state_dict().items():
            assert torch.equal(value, expected.parameters[name])
            assert torch.equal(state["momentum"][name], expected.moments[f"momentum.{name}"])
    told = [line for line in lines if "skipped" in line]
    assert told == ["step 2 skipped: the gradients' norm is nan; 1 skipped in all"]
