"""What would give wrong results without an error is refused, with the user's line, or right."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import msc
from msc.capture.entry import capture
from msc.ir.errors import CaptureError
from msc.passes.normalize import normalize
from tests.capture.models import GPT, Llama, token_batch
from tests.capture.parity import assert_parity, run

Then = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """One linear layer, and then whatever the test does with its output."""

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


X = torch.arange(12.0, dtype=torch.float64).view(3, 4) / 7


def right(then: Then, model: nn.Module | None = None) -> nn.Module:
    """The captured graph computes what the model computes."""
    torch.manual_seed(0)
    model = (model or Model(then)).double()
    captured = capture(model, (X,))
    assert_parity(captured, model, (X,), lambda out: out)
    normalize(captured.graph)
    assert_parity(captured, model, (X,), lambda out: out)
    return model


def refused(then: Then, *words: str) -> None:
    """Capture refuses the model, and its message holds all words and a line of this file."""
    torch.manual_seed(0)
    model = Model(then).double()
    with pytest.raises(CaptureError) as error:
        normalize(capture(model, (X,)).graph)
    message = str(error.value)
    for word in (*words, "test_traps.py:"):
        assert word in message


class TenfoldGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 10


tenfold: Callable[[Tensor], Tensor] = TenfoldGradient.apply


def apply_by_name(x: Tensor) -> Tensor:
    result: Tensor = TenfoldGradient.apply(x)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize(
    ("then", "line"),
    [
        (lambda m, y: tenfold(y).sum(), "tenfold(y).sum()"),
        (lambda m, y: apply_by_name(y).sum(), "result: Tensor = TenfoldGradient.apply(x)"),
    ],
)
def test_autograd_function(then: Then, line: str) -> None:
    refused(then, "TenfoldGradient", line, "register_autograd")


def test_autograd_function_works_again_after_capture() -> None:
    refused(lambda m, y: tenfold(y).sum(), "TenfoldGradient")
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward(tenfold(x).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [10.0, 10.0]


def test_ops_with_a_registered_gradient_are_no_autograd_function() -> None:
    captured = capture(
        Model(lambda m, y: torch.ops.msc.linear(y, m.linear.weight).sum()), (X.float(),)
    )
    assert any(str(n.target) == "msc.linear.default" for n in captured.graph.graph.nodes)


def test_meta_model_gives_the_same_program_on_cpu_fakes() -> None:
    with torch.device("meta"):
        on_meta = GPT()
    real, batch = GPT(), token_batch()
    programs = []
    for model in (on_meta, real):
        captured = capture(model, batch, loss_fn=lambda out: out[1])
        normalize(captured.graph)
        programs.append(str(captured.graph.graph))
        for node in captured.graph.graph.nodes:
            if isinstance(node.meta.get("val"), Tensor):
                assert node.meta["val"].device == torch.device("cpu")
    assert programs[0] == programs[1]
    _, gradients = run(captured, batch)
    assert all(gradient is not None for gradient in gradients.values())
    assert all(parameter.device.type == "meta" for parameter in on_meta.parameters())


def test_buffers_without_values_are_noted() -> None:
    with torch.device("meta"):
        model = Llama()
    captured = capture(model, token_batch())
    assert captured.read_buffer("inv_freq") is None
    assert captured.read_parameter("head.weight") is None
    assert not captured.buffers["inv_freq"].persistent
    notes = msc.compile(model, token_batch()).report.notes
    assert any("inv_freq" in note and "msc.init" in note for note in notes)


def test_tied_weights_are_one_parameter() -> None:
    model, batch = GPT().double(), token_batch()
    captured = capture(model, batch, loss_fn=lambda out: out[1])
    assert captured.parameters["wte.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in captured.parameters
    assert_parity(captured, model, batch, lambda out: out[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_inlined(reentrant: bool) -> None:
    right(
        lambda m, y: checkpoint(lambda z: torch.tanh(m.linear(z)), y, use_reentrant=reentrant).sum()
    )


def test_no_grad_region() -> None:
    def then(m: Any, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = y.abs().mean()
            target = m.linear(y)
        loss: Tensor = ((y / scale - target) ** 2).sum()
        return loss

    right(then)


def test_detach() -> None:
    right(lambda m, y: (y.detach() * y).sum())


def test_enable_grad_inside_no_grad() -> None:
    def then(m: Any, y: Tensor) -> Tensor:
        with torch.no_grad():
            a = y * 2
            with torch.enable_grad():
                b = y * 3
            c = y * 4
        return (a * b * c).sum()

    right(then)


def test_autocast_region() -> None:
    def then(m: Any, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z: Tensor = m.linear(y)
        return z.sum()

    refused(then, "torch.autocast", "model.to(torch.bfloat16)")


def test_capture_inside_autocast() -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="inside torch"),
    ):
        capture(Model(lambda m, y: y.sum()), (X.float(),))


def test_data_dependent_branch() -> None:
    def then(m: Any, y: Tensor) -> Tensor:
        if y.sum() > 0:
            return y.sum()
        return -y.sum()

    refused(then, "depends on the numbers", "if y.sum() > 0:")


def test_item() -> None:
    refused(lambda m, y: y.sum() / y.abs().max().item(), "depends on the numbers")


def test_boolean_indexing() -> None:
    refused(lambda m, y: y[y > 0].sum(), "depends on the numbers")


class Normed(Model):
    def __init__(self) -> None:
        super().__init__(lambda m, y: (m.norm(y) ** 3).sum())
        self.norm = nn.BatchNorm1d(4)


def buffers_after(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the captured graph writes, with their new values."""
    captured = capture(model, (X,))
    arguments = []
    for node in captured.graph.graph.find_nodes(op="placeholder"):
        name = node.meta["name"]
        sources = {"parameter": captured.read_parameter, "buffer": captured.read_buffer}
        arguments.append(X if node.meta["kind"] == "input" else sources[node.meta["kind"]](name))
    _, *written = fx.Interpreter(captured.graph).run(*arguments)
    return dict(zip(captured.graph.meta["buffers"], written, strict=True))


def test_batch_norm_in_train_mode() -> None:
    torch.manual_seed(0)
    model = Normed().double()
    found = buffers_after(model)
    assert sorted(found) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    right(lambda m, y: y, copy.deepcopy(model))
    model(X)
    for name, value in found.items():
        torch.testing.assert_close(value, model.get_buffer(name), rtol=1e-12, atol=1e-12)


def test_batch_norm_of_one_value_per_channel() -> None:
    with pytest.raises(CaptureError, match=r"one value per channel \(shape \[1, 4\]\)"):
        capture(Normed().double(), (X[:1],))


def test_instance_norm_with_running_statistics() -> None:
    class Instance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x).square().sum()
            return y

    with pytest.raises(CaptureError, match=re.escape("norm.running_mean")) as error:
        capture(Instance(), (torch.randn(2, 4, 3),))
    assert ".eval()" in str(error.value)


def test_batch_norm_in_eval_mode() -> None:
    model = Normed()
    model.norm.eval()
    right(lambda m, y: y, model)


class Counting(Model):
    count: Tensor

    def __init__(self) -> None:
        super().__init__(lambda m, y: y.sum() * m.count)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def test_mutated_buffer() -> None:
    model = Counting().double()
    assert float(buffers_after(model)["count"]) == 2
    right(lambda m, y: y, copy.deepcopy(model))
    assert float(model.count) == 1  # capturing changes nothing


def test_mutated_input() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            result: Tensor = self.linear(x).sum()
            return result

    with pytest.raises(CaptureError, match="Input 'x' is changed in place") as error:
        capture(InPlace().double(), (X,))
    assert "test_traps.py:" in str(error.value)


def test_own_collectives() -> None:
    refused(lambda m, y: torch.ops._c10d_functional.all_reduce(y, "sum", "0").sum(), "communicates")


def test_random_op() -> None:
    refused(lambda m, y: (y * torch.rand_like(y)).sum(), "rand_like", "random numbers")


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    torch.manual_seed(0)
    ids, labels = token_batch()
    model = Llama().double()
    captured = capture(model, (ids, ids))
    assert [info.name for info in captured.inputs] == ["ids", "labels"]
    assert_parity(captured, model, (ids, labels), lambda out: out["loss"])


def test_constants_of_the_code() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def then(m: Any, y: Tensor) -> Tensor:
        return (y * weights * torch.tensor(2.0) * torch.tensor([1.0, -1.0, 1.0, -1.0])).sum()

    right(then)


def test_the_default_dtype_at_run_time_does_not_matter() -> None:
    model = Model(lambda m, y: (y * torch.ones(4) * torch.arange(4.0)).sum())
    captured = capture(model, (X.float(),))
    loss, _ = run(captured, (X.float(),))
    torch.set_default_dtype(torch.float64)
    try:
        again, _ = run(captured, (X.float(),))
    finally:
        torch.set_default_dtype(torch.float32)
    assert again.dtype == torch.float32
    assert torch.equal(loss, again)


def test_dropout_depends_on_seed_and_step_only() -> None:
    torch.manual_seed(0)
    model, batch = GPT(dropout=0.5).double(), token_batch()
    captured = capture(model, batch, loss_fn=lambda out: out[1])
    normalize(captured.graph)
    placeholders = [n for n in captured.graph.graph.nodes if n.op == "placeholder"]
    assert placeholders[-1].meta["kind"] == "rng"
    instances = [n.args[1] for n in captured.graph.graph.nodes if "rng_key" in str(n.target)]
    assert instances == list(range(6))  # of each block: the probabilities, and twice the residual
    first, _ = run(captured, batch)
    torch.manual_seed(1)
    second, _ = run(captured, batch)
    assert torch.equal(first, second)
    eager = model.eval()(*batch)[1]
    assert not torch.allclose(first, eager)


def test_model_is_restored_after_an_error() -> None:
    class Fails(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.cache = self.linear(x)
            raise RuntimeError("no")

    model = Fails(lambda m, y: y)
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(CaptureError, match="RuntimeError: no") as error:
        capture(model, (X.float(),))
    assert 'raise RuntimeError("no")' in str(error.value)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not hasattr(model, "cache")


def test_functional_dropout_outside_of_training_is_nothing() -> None:
    right(lambda m, y: functional.dropout(y, 0.5, training=False).sum())
