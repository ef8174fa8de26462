"""Whatever cannot be compiled or run gets one clear error that says what, where, and what to do."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import msc
from tests import models


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return models.GPT(width=32, layers=2)


def compile_gpt(**options: Any) -> msc.program.Program:
    return msc.compile(model(), models.tokens(), **options)


def refused(kind: type[Exception] = msc.PlanError, **options: Any) -> str:
    """The message of a compilation that is refused, as one of the user's errors."""
    with pytest.raises(kind) as error:
        compile_gpt(**options)
    assert isinstance(error.value, msc.UserError)
    return str(error.value)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("xp=2", "Mesh axis 'xp' is unknown. The axes are pp, dp, tp."),
        ("tp=2,tp=2", "name an axis twice"),
        ("tp=-1", "has size -1; a size is a whole number of at least 1"),
        ("tp:2", "write axes as name=size, for example 'pp=2,dp=2,tp=2'"),
        ({"tp": 1.5}, "has size 1.5"),
        ({"tp": True}, "has size True"),
        (4, "A mesh is a string such as"),
    ],
)
def test_meshes(mesh: Any, message: str) -> None:
    assert message in refused(mesh=mesh)


def test_a_rank_outside_of_the_mesh() -> None:
    program = compile_gpt(mesh="tp=2")
    with pytest.raises(msc.UserError, match="Rank 2 is not in the mesh tp=2, which has ranks 0 to"):
        program.rank_graph(2)
    with pytest.raises(msc.UserError, match="Rank -1 is not in the mesh"):
        program.graphs(-1)


@pytest.mark.parametrize(
    ("options", "parts"),
    [({"mesh": "dp=3"}, 3), ({"mesh": "dp=2", "microbatches": 3}, 6), ({"microbatches": 16}, 16)],
)
def test_a_batch_that_does_not_split(options: dict[str, Any], parts: int) -> None:
    message = refused(**options)
    assert "global batch of 8 samples does not split evenly" in message
    assert f"Use a batch that is a multiple of {parts}, or fewer micro-batches" in message


def test_more_stages_than_layers() -> None:
    message = refused(mesh="pp=3")
    assert "3 pipeline stages (pp=3)" in message
    assert "only 2 layers" in message
    assert "Use pp=2 or less" in message


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_numbers_of_micro_batches(count: Any) -> None:
    assert f"microbatches is {count!r}; it is a whole number" in refused(microbatches=count)


def test_unknown_names() -> None:
    assert "Schedule 'dualpipe' is unknown. The schedules are gpipe, 1f1b, interleaved" in refused(
        schedule="dualpipe"
    )
    assert "Backend 'xla' is unknown. The backends are aten, inductor" in refused(
        msc.UserError, backend="xla"
    )
    assert "precision is 'int4'; it is one of float32" in refused(precision="int4")
    assert "There is no pass 'nowhere'" in refused(msc.UserError, passes={"after:nowhere": ()})
    assert "A pass cannot be put at 'cut'" in refused(msc.UserError, passes={"cut": ()})
    with pytest.raises(TypeError, match="unexpected keyword argument 'micro_batches'"):
        compile_gpt(micro_batches=2)


@pytest.mark.parametrize("optimizer", ["adamw", msc.AdamW])
def test_optimizers_of_another_type(optimizer: Any) -> None:
    message = refused(optimizer=optimizer)
    assert "pass msc.AdamW(...), msc.Adam, msc.SGD or msc.LAMB, an optimizer of torch" in message


@pytest.mark.parametrize("options", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_numbers_of_an_optimizer(options: dict[str, Any]) -> None:
    with pytest.raises(msc.PlanError, match=f"AdamW: {next(iter(options))}"):
        msc.AdamW(**options)


def test_a_memory_bound() -> None:
    message = refused(mesh="pp=2", memory=1000)
    assert "Pipeline stage 0 needs" in message or "Pipeline stage 1 needs" in message
    assert "Use more tp or pp ranks, or more micro-batches; a schedule with fewer" in message
    assert "zero=1 or more splits more over dp=2" in refused(mesh="dp=2", memory=1000)
    assert "more dp ranks" in refused(mesh="dp=2", zero=3, memory=1000)
    needed = max(compile_gpt(mesh="pp=2").memory_bytes())
    assert compile_gpt(mesh="pp=2", memory=needed).mesh.size == 2


def test_a_memory_bound_that_no_placement_keeps() -> None:
    message = refused(mesh="pp=2,tp=2", memory=1000)
    assert "Parameters, gradients and optimizer state need at least" in message
    assert "over 'tp' (size 2); but memory is 1,000. Use more tp or pp ranks." in message
    assert "memory is -1; it is a positive number of bytes" in refused(memory=-1)


def test_cluster_files(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    assert f"Cluster file '{file}' cannot be read" in refused(cluster=file)
    file.write_text("{ not json")
    assert f"Cluster file '{file}' cannot be read" in refused(cluster=file)
    file.write_text(json.dumps({"name": "c", "colour": "red"}))
    assert "unknown fields ['colour']" in refused(cluster=file)
    file.write_text(json.dumps({"name": "c"}))
    assert f"Cluster file '{file}' lacks the fields ['devices_per_node'" in refused(cluster=file)
    file.write_text("[1, 2]")
    assert "luster" in refused(cluster=file)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=5"])
def test_heads_that_tp_does_not_divide_are_reported(mesh: str) -> None:
    """It compiles, is right, and says what was done instead of splitting the heads."""
    torch.manual_seed(0)
    odd = models.GPT(width=24, heads=3, layers=2)
    report = msc.verify(odd, models.tokens(), mesh=mesh, dtype=torch.float64)
    assert report.ok, report.first_difference
    said = [line for line in (*report.fallbacks, *report.notes) if line.startswith("h.0: ")]
    assert "does not split the 3 heads" in said[0]
    assert "each rank attends for its part of the samples instead" in said[0]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line
            x = -x
        loss: Tensor = self.layer(x).sum()
        return loss


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounds(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.layer(x)).sum()  # type: ignore[no-any-return, no-untyped-call]


def test_control_flow_that_depends_on_data() -> None:
    with pytest.raises(msc.CaptureError) as error:
        msc.compile(Branches(), (torch.randn(4, 4),))
    assert "test_bad_inputs.py:" in str(error.value)
    assert "in forward: if x.sum() > 0:  # the line" in str(error.value)
    assert "torch.where or a mask" in str(error.value)


def test_a_users_autograd_function() -> None:
    with pytest.raises(msc.CaptureError) as error:
        msc.compile(Rounds(), (torch.randn(4, 4),))
    assert "Straight is a torch.autograd.Function" in str(error.value)
    assert "in forward: return Straight.apply(self.layer(x)).sum()" in str(error.value)
    assert "torch.library.custom_op" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, labels: (ids[:4], labels[:4]), r"ids"),
        (lambda ids, labels: (ids[:, :8], labels[:, :8]), r"ids"),
        (lambda ids, labels: (ids.int(), labels), r"int32"),
        (lambda ids, labels: (ids,), r"input"),
        (lambda ids, labels: {"ids": ids, "labels": labels}, r"input|structure|dict"),
    ],
)
def test_another_batch_is_refused(change: Any, message: str) -> None:
    program = compile_gpt(mesh="dp=2")
    with pytest.raises(msc.InputError, match=message):
        program.run_virtual(change(*models.tokens()))


def test_a_state_of_another_mesh_is_refused() -> None:
    program = compile_gpt(mesh="dp=2")
    state = program.run_virtual(models.tokens()).state
    with pytest.raises(msc.InputError, match="state has 1 ranks; the mesh has 2"):
        program.run_virtual(models.tokens(), state[:1])


def test_a_model_on_meta_compiles_and_does_not_run() -> None:
    with torch.device("meta"):
        shapes = models.GPT(width=32, layers=2)
    program = msc.compile(shapes, models.tokens(), mesh="pp=2,tp=2")
    assert len(program.rank_graphs) == 2
    with pytest.raises(msc.UserError, match=r"has no values: the model was compiled on the meta"):
        program.run_virtual(models.tokens())


def test_verify_takes_one_dtype() -> None:
    with pytest.raises(msc.UserError, match="dtype or precision, not both"):
        msc.verify(model(), models.tokens(), dtype=torch.float64, precision="float64")


def test_a_loss_that_is_no_number() -> None:
    with pytest.raises(msc.UserError, match="loss"):
        msc.compile(nn.Linear(4, 4), (torch.randn(4, 4),))


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"zero": 2}, "zero=2 has no effect: the mesh has no dp"),
        ({"zero": 2, "shard_group": 1, "mesh": "dp=2"}, "no effect with shard_group=1"),
        ({"fuse_collectives": True, "mesh": "dp=2"}, "fuse_collectives=True has no effect"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "without pp there is no bubble"),
    ],
)
def test_options_without_effect_are_noted(options: dict[str, Any], note: str) -> None:
    (found,) = compile_gpt(**options).report.notes
    assert note in found


class OverwritesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        loss = y.square().mean()
        y.zero_()  # what the gradient of sigmoid needs
        return loss + y.sum()


def test_a_backward_that_eager_itself_refuses() -> None:
    with pytest.raises(msc.InputError) as error:
        msc.verify(OverwritesItself(), (torch.ones(2, 4),), dtype=torch.float64)
    assert "The model itself fails in its backward in eager PyTorch, with RuntimeError: one of" in (
        str(error.value)
    )


def test_a_batch_that_the_model_itself_refuses() -> None:
    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    with pytest.raises(msc.InputError) as error:
        msc.verify(nn.Linear(4, 4), (torch.ones(2, 4).double(),), loss_fn=loss, dtype=torch.float64)
    assert "The model itself fails on these inputs in eager PyTorch" in str(error.value)
    assert "torch.float64 [2, 4]; its parameters are of torch.float32" in str(error.value)
