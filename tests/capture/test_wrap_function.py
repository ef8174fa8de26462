"""Autograd functions that a model may call once MSC has been told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.bloom.modeling_bloom import GeLUFunction

import msc
from msc.capture import functions
from msc.ir.errors import CaptureError, UserError
from msc.passes.sharding.rules import custom
from tests import zoo


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_RULES", {})
    monkeypatch.setattr(functions, "_WRAPPED", dict(functions._WRAPPED))


class Tenfold(torch.autograd.Function):
    """x, with ten times its gradient: a backward that no forward has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 10


class Clipped(torch.autograd.Function):
    """Two results, a number among the arguments, a context of its own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, limit: float) -> tuple[Tensor, Tensor]:
        return (x * weight).clamp(-limit, limit), x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, ctx.limit = inputs
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, grown = ctx.saved_tensors
        straight = g * (x.abs() < ctx.limit)  # not quite the derivative, as estimators are
        by_weight = (straight * x).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return straight * weight + h * grown, by_weight, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


tenfold: Callable[[Tensor], Tensor] = Tenfold.apply
clipped: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = Clipped.apply
in_place: Callable[[Tensor], Tensor] = InPlace.apply


class Model(nn.Module):
    def __init__(self, then: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.then = then
        self.up = nn.Linear(12, 24)
        self.weight = nn.Parameter(torch.randn(24))
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.weight
        result: Tensor = self.down(self.then(self, y)).pow(2).mean()
        return result


def use_clipped(model: nn.Module, y: Tensor) -> Tensor:
    assert isinstance(model.weight, Tensor)
    first, second = clipped(y, model.weight, 0.5)
    return first + 0.1 * second


def verified(then: Callable[[nn.Module, Tensor], Tensor], **options: Any) -> Any:
    torch.manual_seed(0)
    model, batch = Model(then).double(), (torch.randn(8, 6, 12).double(),)
    report = msc.verify(model, batch, dtype=torch.float64, **options)
    assert report.ok, report.first_difference
    return report


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
def test_its_own_backward_runs(mesh: str) -> None:
    """`verify` compares with eager, which runs the function itself."""
    msc.wrap_function(Tenfold, "... -> ...")
    report = verified(lambda model, y: tenfold(y), mesh=mesh, microbatches=2)
    assert (report.fallbacks, report.notes) == ((), ())


def test_setup_context_numbers_and_several_results() -> None:
    msc.wrap_function(Clipped, "...d, d -> ...d, ...d")
    report = verified(use_clipped, mesh="dp=2,tp=2", microbatches=2)
    assert (report.fallbacks, report.notes) == ((), ())
    assert report.sharded["tp"]["flops"] > 0.95


def test_without_a_rule_it_runs_whole() -> None:
    msc.wrap_function(Clipped)
    (line,) = verified(use_clipped, mesh="tp=2").fallbacks
    assert "_Clipped has no sharding rule" in line


def test_outside_of_capture_nothing_changes() -> None:
    msc.wrap_function(Tenfold, "... -> ...")
    kept = Tenfold.forward
    verified(lambda model, y: tenfold(y))
    assert Tenfold.forward is kept
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward(tenfold(x).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [10.0, 10.0]


def test_what_is_not_wrapped_is_refused_with_the_way_out() -> None:
    with pytest.raises(CaptureError, match=r"msc\.wrap_function\(InPlace\)"):
        verified(lambda model, y: in_place(y))


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(UserError, match=r"no subclass of torch\.autograd\.Function"):
        msc.wrap_function(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="whole are options of a rule, and there is none"):
        msc.wrap_function(Tenfold, whole="d")
    with pytest.raises(UserError, match="the op takes 1 tensors"):
        msc.wrap_function(Tenfold, "a, b -> a")


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: dict[str, int]) -> Tensor:
        return x * how["times"]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_a_forward_whose_schema_cannot_be_read() -> None:
    with pytest.raises(UserError, match=r"Odd\.forward.*Pass schema="):
        msc.wrap_function(Odd)
    with pytest.raises(UserError, match="is no schema that Odd can have"):
        msc.wrap_function(Odd, schema="(Tensor x, dict how) -> Tensor")


def test_operands_changed_in_place_are_refused() -> None:
    msc.wrap_function(InPlace, "... -> ...")
    with pytest.raises(CaptureError, match="mark_dirty"):
        verified(lambda model, y: in_place(y))


@pytest.mark.parametrize("mesh", ["tp=2", "pp=3,dp=2"])
def test_bloom(mesh: str) -> None:
    """Its GELU is an autograd function."""
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=zoo.VOCABULARY,
        hidden_size=zoo.WIDTH,
        n_layer=zoo.LAYERS,
        n_head=zoo.HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model, batch = BloomForCausalLM(config).train(), zoo.batch("opt")
    msc.wrap_function(GeLUFunction, "... -> ...")
    report = msc.verify(model, batch, mesh=mesh, microbatches=2, dtype=torch.float64)
    assert report.ok, report.first_difference
    assert (report.fallbacks, report.notes) == ((), ())


class Scaled(torch.autograd.Function):
    """Its annotations do not say that `eps` is a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.eps = eps
        return x * eps  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.eps, None


def test_a_failed_attempt_leaves_nothing_behind() -> None:
    with pytest.raises(UserError, match=r"the op takes 2 tensors \(x, eps\).*schema='"):
        msc.wrap_function(Scaled, "... -> ...")
    assert not functions.is_wrapped(Scaled)
    with pytest.raises(UserError, match="schema is 5; it is a string"):
        msc.wrap_function(Scaled, "... -> ...", schema=5)  # type: ignore[arg-type]
    msc.wrap_function(Scaled, "... -> ...", schema="(Tensor x, float eps) -> Tensor")
    apply: Any = Scaled.apply
    report = verified(lambda model, y: apply(y, 0.5), mesh="tp=2")
    assert report.fallbacks == ()
