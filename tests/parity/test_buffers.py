"""Buffers that the forward writes: as gradient accumulation on one device leaves them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.program import Program
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import parameter_errors

pytestmark = pytest.mark.usefixtures("capture_once")

MESHES = ["", "dp=2", "tp=2", "pp=3", "pp=3,dp=2,tp=2"]
ADAMW = msc.AdamW(lr=1e-2, weight_decay=0.1)


class Normed(nn.Module):
    """Layers with batch norm (no bias before it: its gradient would be rounding alone)."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12)) for _ in range(3)
        )
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class Images(nn.Module):
    """Convolutions whose first norm stands before every parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, affine=False, momentum=0.3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + functional.relu(block(x))
        return x.square().mean()


class Scaled(nn.Module):
    """A running maximum of activations that scales the activations of the next micro-batch."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.register_buffer("largest", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) / self.largest.clone()
        self.largest.copy_(torch.maximum(self.largest * 0.9, h.detach().abs().amax(0)))
        result: Tensor = self.second(h).square().mean()
        return result


def build(kind: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    model = {"normed": Normed, "images": Images, "scaled": Scaled}[kind]()
    shape = (12, 4, 4, 4) if kind == "images" else (12, 12)
    return model, [(torch.randn(shape),) for _ in range(3)]


def accumulated(
    model: nn.Module, batches: list[tuple[Tensor, ...]], microbatches: int
) -> tuple[list[float], nn.Module]:
    """Losses, and the model that torch has trained on one device with gradient accumulation."""
    model = copy.deepcopy(model).double()
    options: dict[str, Any] = {"lr": ADAMW.lr, "weight_decay": ADAMW.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses = []
    for (x,) in batches:
        optimizer.zero_grad()
        total = 0.0
        for index in range(microbatches):
            loss = model(x.double().chunk(microbatches)[index]) / microbatches
            torch.autograd.backward(loss)
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, model


def compiled(kind: str, mesh: str, microbatches: int) -> Program:
    model, batches = build(kind)
    return msc.compile(
        model,
        batches[0],
        mesh=mesh,
        microbatches=microbatches,
        optimizer=ADAMW,
        precision="float64",
    )


def check(kind: str, mesh: str, microbatches: int) -> Program:
    """Three steps give the losses, parameters and buffers of one device."""
    program = compiled(kind, mesh, microbatches)
    model, batches = build(kind)
    losses, expected = accumulated(model, batches, microbatches)
    state = None
    for batch, loss in zip(batches, losses, strict=True):
        result = program.run_virtual(batch, state)
        state = result.state
        assert float(result.loss) == pytest.approx(loss, rel=1e-10)
    found = program.state_dict(result)
    assert found.keys() == model.state_dict().keys()
    assert parameter_errors(found, expected.state_dict()) == {}
    assert result.buffers.keys() == dict(model.named_buffers()).keys()
    for rank in state or ():
        for name, value in rank.buffers.items():
            torch.testing.assert_close(value, expected.get_buffer(name), rtol=1e-9, atol=1e-12)
    model.load_state_dict(found)
    return program


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["normed", "images"])
def test_batch_norm(kind: str, mesh: str, microbatches: int) -> None:
    program = check(kind, mesh, microbatches)
    assert program.report.fallbacks == ()
    (note,) = [n for n in program.report.notes if "writes these buffers" in n]
    assert "from the rows of all dp ranks" in note
    separate = [n for n in program.report.notes if "computed per micro-batch" in n]
    assert bool(separate) == (microbatches > 1)


class Residual(nn.Module):
    """Convolutions with a bias, which batch norm takes off: its gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(7, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU())
            for _ in range(5)
        )
        self.head = nn.Linear(7, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_zero_but_for_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(6, 3, 6, 6), torch.randint(11, (6,)))
    report = msc.verify(Residual(), batch, mesh="dp=2", microbatches=3, dtype=dtype)
    assert report.ok, report.first_difference


@pytest.mark.parametrize("mesh", ["", "dp=2", "tp=2", "dp=2,tp=2"])
def test_a_buffer_of_the_users_own(mesh: str) -> None:
    """Each micro-batch reads what the one before has written."""
    check("scaled", mesh, 3)


def test_the_statistics_over_dp_are_collectives_not_gathered_rows() -> None:
    program = compiled("normed", "dp=2", 1)
    gathers = [counts for counts in program.report.collectives if "all_gather" in counts]
    assert gathers == []
    forward = program.graphs(0)["forward"]
    reduce = torch.ops._c10d_functional.all_reduce.default
    reduced = forward.graph.find_nodes(op="call_function", target=reduce)
    assert {tuple(node.meta["val"].shape) for node in reduced} <= {(1, 12), (12,), ()}
    assert len(reduced) >= 6  # a mean and a variance per layer


def test_evaluation_uses_running_statistics(tmp_path: Path) -> None:
    program = compiled("normed", "", 2)
    program.save(tmp_path)
    model, batches = build("normed")
    _, expected = accumulated(model, batches, 2)
    with msc.Trainer(msc.load(tmp_path), batches, log=False) as trainer:
        trainer.fit(len(batches))
        before = trainer.state_dict()
        found = trainer.evaluate(batches)
        after = trainer.state_dict()
    assert parameter_errors(after, expected.state_dict()) == {}
    assert all(torch.equal(before[name], after[name]) for name in before)
    expected.eval()
    with torch.no_grad():
        losses = [float(expected(x.double())) for (x,) in batches]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_verify_leaves_the_buffers_of_the_model_alone() -> None:
    model, batches = build("normed")
    before = copy.deepcopy(dict(model.named_buffers()))
    report = msc.verify(model, batches[0], mesh="dp=2", microbatches=2, dtype=torch.float64)
    assert report.ok, report.first_difference
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


class Shared(nn.Module):
    """The last layer writes a buffer that the first one reads."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[1](torch.tanh(self.layers[0](x + self.seen)))
        self.seen.copy_(h.detach().mean(0))
        result: Tensor = h.square().mean()
        return result


def test_a_buffer_of_two_stages_is_refused() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 12),)
    with pytest.raises(msc.PlanError, match=r"Buffer 'seen' is written on pipeline stage 1 and"):
        msc.compile(Shared(), batch, mesh="pp=2")
    assert msc.verify(Shared(), batch, mesh="dp=2,tp=2", dtype=torch.float64).ok


class Averaged(nn.Module):
    """What is in front of the layers keeps an average that nobody else reads."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.register_buffer("average", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h.square().mean()


def test_a_buffer_is_written_on_the_stage_that_makes_its_values() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 12),)
    assert msc.verify(Averaged(), batch, mesh="pp=2", microbatches=2, dtype=torch.float64).ok
