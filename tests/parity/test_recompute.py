"""What is recomputed is what was saved: every policy gives the same loss and gradients."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import nn

import msc
from msc.ir.communication import graphs_below
from msc.program import Program
from msc.step_result import StepResult
from tests import models
from tests.parity.captures import capture_once as capture_once

pytestmark = pytest.mark.usefixtures("capture_once")

POLICIES = ("selective", "full")
CASES = [
    ("dropout", "pp=2,dp=2,tp=2", 2),
    ("llama-like", "tp=2", 1),
    ("bert", "pp=2,tp=2", 2),
]
if "MSC_TEST_LONG" in os.environ:  # set by `make test-long`
    CASES += [
        ("dropout", "tp=2", 1),
        ("llama-like", "tp=4", 1),
        ("llama-like", "pp=2", 2),
        ("gpt2", "dp=2,tp=2", 2),
    ]


@functools.cache
def model(name: str) -> nn.Module:
    if name == "dropout":
        torch.manual_seed(0)
        return models.GPT(layers=2, dropout=0.2)
    return models.build(name)


def batch(name: str) -> Any:
    return models.batch("nanogpt" if name == "dropout" else name)


def compiled(name: str, mesh: str, micro_batches: int, recompute: Any) -> Program:
    return msc.compile(
        model(name),
        batch(name),
        mesh=mesh,
        microbatches=micro_batches,
        recompute=recompute,
        precision="float64",
    )


def calls_again(program: Program) -> int:
    """Calls of a forward in the backwards."""
    return sum(
        node.meta.get("phase") == "recompute"
        for graph in program.rank_graphs
        for gm in graphs_below(graph)
        for node in gm.graph.nodes
    )


def assert_equal(one: StepResult, other: StepResult) -> None:
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-12, atol=0)
    assert one.grads.keys() == other.grads.keys()
    for name, grad in one.grads.items():
        torch.testing.assert_close(grad, other.grads[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "mesh", "micro_batches"), CASES)
def test_policies_change_no_number(name: str, mesh: str, micro_batches: int) -> None:
    plain = compiled(name, mesh, micro_batches, "none")
    assert calls_again(plain) == 0
    expected = plain.run_virtual(batch(name))
    memory = max(plain.memory_bytes())
    for policy in POLICIES:
        program = compiled(name, mesh, micro_batches, policy)
        assert_equal(program.run_virtual(batch(name)), expected)
        assert max(program.memory_bytes()) <= memory
        assert calls_again(program) > 0 or policy == "selective"


def test_parity_with_one_device() -> None:
    report = msc.verify(
        model("dropout"),
        batch("dropout"),
        mesh="pp=2,tp=2",
        microbatches=2,
        recompute="full",
        dtype=torch.float64,
    )
    assert report.ok, report.first_difference


def test_unequal_shards() -> None:
    """Ranks whose shards have other shapes issue the same collectives."""
    gpt = models.GPT(vocabulary=97, layers=2, dropout=0.1)
    report = msc.verify(
        gpt, models.tokens(samples=2, length=8), mesh="tp=3", recompute="full", dtype=torch.float64
    )
    assert report.ok, report.first_difference


class Normed(nn.Module):
    """Layers with batch norm, whose statistics the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def test_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    normed, inputs = Normed(), (torch.randn(8, 8),)
    results = []
    for recompute in ("none", "full"):
        program = msc.compile(normed, inputs, recompute=recompute, microbatches=2)
        assert (calls_again(program) > 0) == (recompute == "full")
        results.append(program.run_virtual(inputs))
    plain, again = results
    assert_equal(again, plain)
    assert plain.buffers.keys() == again.buffers.keys()
    assert "layers.0.1.running_mean" in plain.buffers
    for name, value in plain.buffers.items():
        assert torch.equal(value, again.buffers[name]), name


class NormalizedLayers(nn.Module):
    """Layers with batch norm: what their forward computes has names that their backward has too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Linear(24, 16))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        result: torch.Tensor = self.last(x).square().mean()
        return result


def test_saved_values_have_names_of_their_own() -> None:
    options: dict[str, Any] = {"mesh": "pp=2,tp=2", "microbatches": 2, "recompute": "selective"}
    found = msc.verify(NormalizedLayers(), (torch.randn(24, 10),), dtype=torch.float64, **options)
    assert found.ok, found.first_difference


def test_a_budget_is_kept_with_as_little_work_as_that_takes() -> None:
    plain = compiled("dropout", "pp=2", 2, "none")
    expected = plain.run_virtual(batch("dropout"))
    with pytest.raises(
        msc.PlanError, match=r"pipeline stage \d needs at least ([\d,]+) with"
    ) as caught:
        compiled("dropout", "pp=2", 2, msc.MemoryBudget(1000))
    leanest = int(str(caught.value).split("at least ")[1].split()[0].replace(",", ""))
    most = max(plain.memory_bytes())
    calls = []
    for budget in (leanest, (leanest + 3 * most) // 4, most):
        program = compiled("dropout", "pp=2", 2, msc.MemoryBudget(budget))
        assert max(program.memory_bytes()) <= budget
        assert_equal(program.run_virtual(batch("dropout")), expected)
        calls.append(calls_again(program))
    assert calls[0] > calls[1] > calls[2] == 0


@pytest.mark.parametrize(("layers", "mesh"), [(1, ""), (2, "pp=2")])
def test_what_a_policy_or_a_budget_needs_is_a_budget_that_is_kept(layers: int, mesh: str) -> None:
    """Though the leanest choice may need more at its peak, by what one backward recomputes."""
    gpt, inputs = models.GPT(layers=layers), models.tokens(samples=4, length=16)

    def needs(recompute: Any) -> int:
        program = msc.compile(gpt, inputs, mesh=mesh, recompute=recompute)
        return max(program.memory_bytes())

    budgets = {needs(policy) for policy in ("none", *POLICIES)}
    for budget in sorted(budgets):
        needed = needs(msc.MemoryBudget(budget))
        assert needed <= budget
        assert needs(msc.MemoryBudget(needed)) <= needed


@pytest.mark.parametrize("recompute", ["some", None, 1e9, True])
def test_what_is_no_policy_is_refused(recompute: Any) -> None:
    with pytest.raises(msc.PlanError, match=r"recompute is .* or msc\.MemoryBudget"):
        compiled("dropout", "", 1, recompute)


@pytest.mark.parametrize("size", [0, -1, "1", True, None, float("nan")])
def test_a_budget_is_a_positive_number(size: Any) -> None:
    with pytest.raises(msc.PlanError, match="positive number of bytes"):
        msc.MemoryBudget(size)
