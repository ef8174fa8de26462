"""The example batch, the loss, and what a capture records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from msc.capture.captured import InputInfo
from msc.capture.entry import capture
from msc.ir.errors import CaptureError, InputError
from msc.ir.structure import output_nodes
from tests.capture.models import GPT, Llama, token_batch
from tests.capture.parity import assert_parity, run


class Regression(nn.Module):
    """Takes several inputs, of which `scale` is shared by the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        self.linear.bias.requires_grad_(False)

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, scale: Tensor, options: Any = None
    ) -> dict[str, Tensor]:
        z = self.linear(x) * scale
        if y is not None:
            z = z - y
        if options is not None:
            z = z * options["factor"]
        return {"loss": (z**2).mean()}


def regression_batch() -> dict[str, Any]:
    return {
        "x": torch.randn(6, 4).double(),
        "y": torch.randn(6, 2).double(),
        "scale": torch.randn(2).double(),
        "options": {"factor": 3},
    }


def test_what_is_recorded() -> None:
    model, batch = Regression().double(), regression_batch()
    captured = capture(model, batch)
    assert captured.batch_size == 6
    assert captured.inputs == (
        InputInfo("x", (6, 4), torch.float64, 0),
        InputInfo("y", (6, 2), torch.float64, 0),
        InputInfo("scale", (2,), torch.float64, None),
    )
    assert [p.requires_grad for p in captured.parameters.values()] == [True, False, True, True]
    (note,) = captured.notes
    assert "unused.weight, unused.bias" in note
    names = [n.meta["name"] for n in captured.graph.graph.nodes if n.op == "placeholder"]
    assert names == [*captured.parameters, "x", "y", "scale"]
    assert_parity(captured, model, batch, lambda out: out["loss"])


def test_the_model_keeps_its_parameters() -> None:
    model = GPT()
    before = dict(model.named_parameters(remove_duplicate=False))
    capture(model, token_batch(), loss_fn=lambda out: out[1])
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert model.lm_head.weight is model.wte.weight


def test_names_of_positional_inputs() -> None:
    captured = capture(Llama(), token_batch())
    assert [info.name for info in captured.inputs] == ["ids", "labels"]


def test_batches_that_differ_are_refused() -> None:
    captured = capture(Regression().double(), regression_batch())
    batch = regression_batch()
    assert [tuple(t.shape) for t in captured.flatten(batch)] == [(6, 4), (6, 2), (2,)]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"x": torch.zeros(5, 4).double()}, r"'x' has shape \[5, 4\].*compiled for \[6, 4\]"),
        ({"x": torch.zeros(6, 4)}, "'x' is torch.float32.*compiled for torch.float64"),
        ({"x": None}, "structure|tensor is needed"),
        ({"options": {"factor": 4}}, r"'options\['factor'\]' is 4"),
        ({"extra": torch.zeros(1)}, "structure"),
    ]
    for change, message in changes:
        with pytest.raises(InputError, match=message):
            captured.flatten({**batch, **change})
    with pytest.raises(InputError, match="structure"):
        captured.flatten((batch["x"], batch["y"]))
    with pytest.raises(InputError, match="tuple"):
        captured.flatten(3)


def test_batch_dims() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4).double())

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return ((x * self.weight).sum(0) @ table).mean()

    model, batch = TimeFirst(), (torch.randn(5, 3, 4).double(), torch.randn(4, 3).double())
    captured = capture(model, batch, batch_dims={"x": 1, "table": None})
    assert [info.batch_dim for info in captured.inputs] == [1, None]
    assert captured.batch_size == 3
    assert_parity(captured, model, batch, lambda out: out)
    with pytest.raises(CaptureError, match=r"batch_dims names .*'z'"):
        capture(model, batch, batch_dims={"z": 0})
    with pytest.raises(CaptureError, match="has 2 dims"):
        capture(model, batch, batch_dims={"table": 2})
    for dim in ("0", True, 1.0):
        with pytest.raises(CaptureError, match=r"batch_dims\['x'\] is .*; it is a dim, or None"):
            capture(model, batch, batch_dims={"x": dim})  # type: ignore[dict-item]
    with pytest.raises(CaptureError, match="differ in the length"):
        capture(model, batch, batch_dims={"x": 0, "table": 0})


@pytest.mark.parametrize("size", [1, 4])
def test_a_model_that_fixes_its_batch(size: int) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size, 3).double())

        def forward(self, x: Tensor) -> Tensor:
            return ((x + self.weight) * x.view(size, 3)).sum()

    model, batch = Fixed(), (torch.randn(size, 3).double(),)
    captured = capture(model, batch)
    assert captured.batch_size == size
    assert any("fixes its batch size" in note for note in captured.notes)
    assert_parity(captured, model, batch, lambda out: out)


def test_a_tuple_needs_a_loss_function() -> None:
    with pytest.raises(CaptureError, match="a tuple of 2") as error:
        capture(GPT(), token_batch())
    assert "loss_fn" in str(error.value)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda out: out["loss"] > 0, "a torch.bool tensor"),
        (lambda out: out["loss"].view(1), r"shape \[1\].*\.mean"),
        (lambda out: 3, "type int"),
        (lambda out: out["loss"].detach(), "no trainable parameter"),
    ],
)
def test_what_is_no_loss(loss_fn: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Llama(), token_batch(), loss_fn=loss_fn)


def test_an_output_without_a_loss() -> None:
    class NoLoss(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x}

    with pytest.raises(CaptureError, match=r"keys \['logits'\]"):
        capture(NoLoss(), (torch.zeros(2, 2),))


def test_a_batch_without_tensors() -> None:
    with pytest.raises(CaptureError, match="no tensor"):
        capture(Llama(), (None, 3))


def test_dtype_converts_model_and_batch() -> None:
    model, batch = Regression(), regression_batch()
    captured = capture(model, batch, dtype=torch.bfloat16)
    assert {info.dtype for info in captured.parameters.values()} == {torch.bfloat16}
    assert {t.dtype for t in captured.flatten(batch)} == {torch.bfloat16}
    (loss,) = output_nodes(captured.graph)
    assert loss.meta["val"].dtype == torch.bfloat16
    assert model.linear.weight.dtype == torch.float32


def test_float64_lifts_casts_to_float32() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = (x * self.weight).float() + torch.ones(3, dtype=torch.float32)
            return y.softmax(-1, dtype=torch.float32).to(x.dtype).square().sum() + y.sum()

    model, batch = Casts(), (torch.randn(2, 3),)
    captured = capture(model, batch, dtype=torch.float64)
    for node in captured.graph.graph.nodes:
        if node.op != "output":
            assert node.meta["val"].dtype == torch.float64
    loss, _ = run(captured, batch)
    assert loss.dtype == torch.float64


def test_loss_functions_with_tensors() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x)
            return result

    weight = torch.tensor([1.0, 2.0, 0.5])
    loss_fn = nn.CrossEntropyLoss(weight=weight)
    target = torch.tensor([0, 2, 1])
    model, batch = Logits(), (torch.randn(3, 4),)
    captured = capture(model, batch, loss_fn=lambda out: loss_fn(out, target))
    loss, _ = run(captured, batch)
    torch.testing.assert_close(loss, loss_fn(model(*batch), target))
    with pytest.raises(CaptureError, match="loss_fn has parameters"):
        capture(model, batch, loss_fn=nn.Linear(3, 1))
