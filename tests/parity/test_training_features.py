"""Parity for what models and losses do beside the plain path; float64 on the virtual executor."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.verification import Reference, VerifyReport
from tests import models
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import EXACT, parameter_errors, step_errors

pytestmark = pytest.mark.usefixtures("capture_once")

SIZES: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4}
MESHES = ["pp=2,tp=2", "dp=2,tp=2", "pp=2,dp=2"]
EVERY_AXIS = "pp=2,dp=2,tp=2"


def fresh(**changes: Any) -> models.GPT:
    torch.manual_seed(0)
    return models.GPT(**SIZES | changes)


gpt = functools.cache(fresh)
"""The same for tests that leave the model as it is."""


def agrees(model: nn.Module, inputs: Any, mesh: str, **options: Any) -> VerifyReport:
    """Verify in float64, and hold every number to 1e-10."""
    report = msc.verify(model, inputs, mesh=mesh, dtype=torch.float64, **options)
    assert report.ok, report.first_difference
    assert max(report.loss_error, *report.grad_errors.values()) <= EXACT
    return report


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gpipe(microbatches: int) -> None:
    options: dict[str, Any] = {"schedule": "gpipe", "microbatches": microbatches}
    report = agrees(gpt(layers=4), models.tokens(), "pp=4,dp=2", **options)
    assert report.notes == ()


def test_more_micro_batches_than_stages_and_fewer() -> None:
    model = gpt(layers=4)
    inputs = models.tokens(samples=12)
    agrees(model, inputs, "pp=4", microbatches=2)
    agrees(model, inputs, "pp=2", microbatches=6)


@pytest.mark.parametrize("mesh", MESHES)
def test_frozen_parameters(mesh: str) -> None:
    model = fresh()
    frozen = ["wpe.weight", "h.0.attn.weight", "h.1.up.bias", "ln_f.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    report = agrees(model, models.tokens(), mesh, microbatches=2)
    assert not set(frozen) & set(report.grad_errors)
    options: dict[str, Any] = {"mesh": mesh, "precision": "float64"}
    program = msc.compile(model, models.tokens(), optimizer=msc.AdamW(lr=0.1), **options)
    result = program.run_virtual(models.tokens())
    for name, layout in program.parameters.items():
        same = torch.equal(result.params[name], program.read_parameter(name))
        assert same != layout.trainable, name


def test_a_frozen_first_stage() -> None:
    """No gradient flows back through the pipeline to what has nothing to train."""
    model = fresh(layers=4)
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
    for part in (model.wte, model.wpe, model.h[0], model.h[1]):
        part.requires_grad_(False)
    agrees(model, models.tokens(), EVERY_AXIS, microbatches=2)


class Unused(models.GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.spare = nn.Linear(4, 4)


@pytest.mark.parametrize("mesh", MESHES)
def test_unused_parameters(mesh: str) -> None:
    model = Unused(**SIZES)
    report = agrees(model, models.tokens(), mesh)
    assert (report.grad_errors["spare.weight"], report.grad_errors["spare.bias"]) == (0, 0)
    program = msc.compile(model, models.tokens(), mesh=mesh, optimizer=msc.AdamW(lr=0.1))
    result = program.run_virtual(models.tokens())
    assert "spare.weight" not in result.grads
    assert torch.equal(result.params["spare.weight"], model.spare.weight)
    model.load_state_dict(program.state_dict(result))


@pytest.mark.parametrize("mesh", ["pp=2", "pp=4", "pp=4,tp=2"])
def test_tied_weights_across_stages(mesh: str) -> None:
    """The gradient is the sum over both uses, and both copies stay equal."""
    model = gpt(layers=4)
    agrees(model, models.tokens(), mesh, microbatches=2)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "precision": "float64"}
    program = msc.compile(model, models.tokens(), optimizer=msc.AdamW(lr=1e-2), **options)
    layout = program.parameters["wte.weight"]
    assert len(layout.stages) == 2
    state = program.run_virtual(models.tokens()).state
    for seed in (1, 2):
        state = program.run_virtual(models.tokens(seed), state).state
    for rank in range(program.mesh.size):
        coordinate = program.mesh.coordinate(rank)
        if coordinate["pp"] == layout.stages[1]:
            other = program.mesh.rank({**coordinate, "pp": layout.stages[0]})
            first, second = (state[r].parameters["wte.weight"] for r in (rank, other))
            assert torch.equal(first, second)


@pytest.mark.parametrize("mesh", [*MESHES, "dp=4"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_ignored_labels_are_counted_over_the_whole_batch(mesh: str, microbatches: int) -> None:
    """Ranks and micro-batches have very different numbers of tokens; some have none."""
    ids, labels = models.tokens()
    labels[:3] = models.IGNORED
    labels[5, 1:] = models.IGNORED
    report = agrees(gpt(), (ids, labels), mesh, microbatches=microbatches)
    assert report.notes == ()


def test_every_label_ignored_is_nan_on_both_sides() -> None:
    ids, labels = models.tokens()
    labels[:] = models.IGNORED
    report = msc.verify(gpt(), (ids, labels), mesh=EVERY_AXIS, dtype=torch.float64)
    assert report.ok, report.first_difference
    assert report.loss != report.loss


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [*((mesh, 2) for mesh in MESHES), (EVERY_AXIS, 1), (EVERY_AXIS, 2)]
)
def test_dropout(mesh: str, microbatches: int) -> None:
    """In training mode the same elements are dropped on every mesh and in every step."""
    model = gpt(dropout=0.2)
    inputs = models.tokens()
    agrees(model, inputs, mesh, microbatches=microbatches)
    options: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches}
    program = msc.compile(
        model, inputs, precision="float64", optimizer=msc.AdamW(lr=0.0, weight_decay=0.0), **options
    )
    reference = Reference(program, model, inputs, {})
    first = program.run_virtual(inputs, seed=3)
    losses = [first.loss, program.run_virtual(inputs, first.state).loss]
    for step, loss in enumerate(losses):
        expected, _ = reference.run(inputs, step=step, seed=3)
        assert float((loss - expected).abs()) <= 1e-12
    assert float((losses[0] - losses[1]).abs()) > 1e-4


class BatchStatistics(nn.Module):
    """Normalizes over the samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.down = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            h = (h - h.mean(0, keepdim=True)) * torch.rsqrt(h.var(0, keepdim=True) + 1e-5)
            x = x + torch.tanh(h)
        result: Tensor = self.down(x).square().mean()
        return result


class Contrastive(nn.Module):
    """Every sample is compared with every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x, y = x + torch.tanh(layer(x)), y + torch.sin(layer(y))
        scores = functional.normalize(x) @ functional.normalize(y).T
        return functional.cross_entropy(scores / 0.1, torch.arange(x.shape[0], device=x.device))


def coupled(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model whose loss is no sum over samples, and a batch."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    return (BatchStatistics(), (x,)) if kind == "statistics" else (Contrastive(), (x, y))


@pytest.mark.parametrize("kind", ["statistics", "contrastive"])
@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2", "pp=2"])
def test_a_loss_that_is_no_sum_over_samples(kind: str, mesh: str) -> None:
    """It is taken per micro-batch, as gradient accumulation does, and the report says so."""
    model, inputs = coupled(kind)
    report = agrees(model, inputs, mesh, microbatches=2)
    assert any("computed per micro-batch" in note for note in report.notes)
    model.double()
    with torch.no_grad():
        parts = [
            float(model(*(t.double()[rows] for t in inputs)))
            for rows in ([0, 1, 2, 3], [4, 5, 6, 7])
        ]
    assert report.loss == pytest.approx(sum(parts) / 2, abs=1e-12)


@pytest.mark.parametrize("kind", ["statistics", "contrastive"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "pp=2"])
def test_one_micro_batch_of_such_a_loss_is_exact(kind: str, mesh: str) -> None:
    model, inputs = coupled(kind)
    report = agrees(model, inputs, mesh)
    assert report.notes == ()
    model.double()
    with torch.no_grad():
        loss = float(model(*(t.double() for t in inputs)))
    assert report.loss == pytest.approx(loss, abs=1e-12)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


torch.export.register_dataclass(Output)


class Heads(nn.Module):
    """Returns what `kind` says, around the same small network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Any:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        loss = functional.mse_loss(x, target)
        if self.kind == "dict":
            return {"loss": loss, "logits": x}
        if self.kind == "dataclass":
            return Output(loss, x)
        return x if self.kind == "output" else loss


@pytest.mark.parametrize("kind", ["loss", "dict", "dataclass"])
def test_kinds_of_outputs(kind: str) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(8, 16), torch.randn(8, 16))
    agrees(Heads(kind), inputs, EVERY_AXIS, microbatches=2)


def test_loss_function() -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(8, 16), torch.randn(8, 16))
    agrees(Heads("output"), inputs, EVERY_AXIS, microbatches=2, loss_fn=lambda x: x.pow(2).mean())


class Shared(nn.Module):
    """One input is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x) * table)
        return x.square().mean()


@pytest.mark.parametrize("mesh", [*MESHES, EVERY_AXIS])
def test_an_input_without_a_batch(mesh: str) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 16), "table": torch.randn(16)}
    agrees(Shared(), inputs, mesh, microbatches=2)


def test_an_input_without_a_batch_of_the_same_length() -> None:
    """`batch_dims` says what no one can see from the shapes."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(16, 4, 16), "table": torch.randn(16)}
    agrees(Shared(), inputs, EVERY_AXIS, microbatches=2, batch_dims={"table": None})


@pytest.mark.parametrize("mesh", [*MESHES, EVERY_AXIS])
def test_nan_in_the_inputs_is_carried_through(mesh: str) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(8, 16), torch.randn(8, 16)
    x[5, 3] = float("nan")
    model = Heads("loss")
    program = msc.compile(model, (x, target), mesh=mesh, microbatches=2, precision="float64")
    result = program.run_virtual((x, target))
    assert bool(result.loss.isnan())
    assert all(bool(gradient.isnan().any()) for gradient in result.grads.values())
    report = msc.verify(model, (x, target), mesh=mesh, microbatches=2, dtype=torch.float64)
    assert report.ok, report.first_difference


class Masked(nn.Module):
    """Attention with a mask that is an input: boolean or added, per sample or shared."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        loss: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, 32)).square().mean()
        return loss


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("shape", [(8, 1, 6, 6), (8, 4, 6, 6), (6, 6), (8, 1, 1, 6)])
@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
def test_mask_inputs(mesh: str, shape: tuple[int, ...], added: bool) -> None:
    torch.manual_seed(0)
    keep = torch.rand(shape) > 0.3
    keep[..., 0] = True
    mask = torch.where(keep, 0.0, -5.0) if added else keep
    inputs = {"x": torch.randn(8, 6, 32), "mask": mask}
    report = agrees(Masked(), inputs, mesh, microbatches=2)
    assert report.fallbacks == ()


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2", "pp=2,dp=2", "tp=2"])
def test_one_sample_per_rank_and_micro_batch(mesh: str) -> None:
    """A local batch of 1 is a size, and no broadcast."""
    dp = msc.Mesh.parse(mesh).axis_size("dp")
    for samples, microbatches in ((dp, 1), (2 * dp, 2)):
        agrees(gpt(), models.tokens(samples=samples), mesh, microbatches=microbatches)


def test_a_batch_of_one() -> None:
    agrees(gpt(), models.tokens(samples=1), "pp=2,tp=2")


class Buffers(nn.Module):
    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x * self.scale) + self.shift)
        return x.square().mean()


@pytest.mark.parametrize("mesh", MESHES)
def test_buffers(mesh: str) -> None:
    torch.manual_seed(0)
    agrees(Buffers(), (torch.randn(8, 16),), mesh, microbatches=2)


def test_grouped_heads() -> None:
    torch.manual_seed(0)
    model = models.Llama(width=32, layers=2, heads=4, kv_heads=2)
    report = agrees(model, models.tokens(), EVERY_AXIS, microbatches=2)
    assert report.fallbacks == ()


def test_the_trained_state_goes_back_into_the_module() -> None:
    inputs = models.tokens()
    plain, model = fresh().double(), fresh().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    options: dict[str, Any] = {"mesh": EVERY_AXIS, "microbatches": 2}
    program = msc.compile(model, inputs, optimizer=msc.AdamW(lr=1e-2, weight_decay=0.1), **options)
    state = None
    for _ in range(3):
        plain.zero_grad()
        plain(*inputs).backward()
        optimizer.step()
        result = program.run_virtual(inputs, state)
        state = result.state
    model.load_state_dict(program.state_dict(result))
    expected = {name: value.detach() for name, value in plain.state_dict().items()}
    assert parameter_errors(model.state_dict(), expected) == {}


def test_float32_is_close_too() -> None:
    model = gpt()
    inputs = models.tokens()
    program = msc.compile(model, inputs, mesh=EVERY_AXIS, microbatches=2)
    loss, grads = Reference(program, model, inputs, {}).run(inputs)
    result = program.run_virtual(inputs)
    assert result.loss.dtype == torch.float32
    errors = step_errors(program, result, loss, grads)
    assert max(errors.values()) <= 1e-5
