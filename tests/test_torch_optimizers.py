"""Optimizers of torch as part of a program: what is read of them, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import msc
from msc.torch_optimizers import as_optimizer


def model() -> nn.Module:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)).double()
    found[2].weight.requires_grad_(True)
    return found


def split(plain: nn.Module) -> list[dict[str, Any]]:
    vectors = [p for p in plain.parameters() if p.dim() < 2]
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda m: torch.optim.AdamW(split(m), lr=0.1, betas=(0.8, 0.9), weight_decay=0.2),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, eps=1e-6, weight_decay=0.2),
    "decoupled": lambda m: torch.optim.Adam(
        m.parameters(), weight_decay=0.2, decoupled_weight_decay=True
    ),
    "sgd": lambda m: torch.optim.SGD(split(m), lr=0.1, momentum=0.9, dampening=0.5, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_program_steps_as_torch_does(name: str) -> None:
    plain = model()
    optimizer = OPTIMIZERS[name](plain)
    before = copy.deepcopy(optimizer.state_dict())
    batch = (torch.randn(4, 3, dtype=torch.float64),)
    program = msc.compile(
        plain, batch, loss_fn=lambda y: y.square().mean(), mesh="tp=2", optimizer=optimizer
    )
    assert optimizer.state_dict() == before  # it is only read
    state = None
    for _ in range(3):
        result = program.run_virtual(batch, state)
        state = result.state
    for _ in range(3):
        optimizer.zero_grad()
        plain(*batch).square().mean().backward()
        optimizer.step()
    for parameter, value in plain.named_parameters():
        torch.testing.assert_close(result.params[parameter], value.data, rtol=1e-12, atol=1e-12)


def test_what_is_read() -> None:
    plain = model()
    found = as_optimizer(OPTIMIZERS["adamw"](plain), plain)
    group = msc.ParameterGroup(["0.bias"], weight_decay=0.0)
    assert found == msc.AdamW(lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, groups=[group])
    frozen = model()
    frozen[2].weight.requires_grad_(False)  # type: ignore[index]
    trained = [p for p in frozen.parameters() if p.requires_grad]
    for held in (trained, list(frozen.parameters())):  # torch skips what has no gradient
        assert as_optimizer(torch.optim.SGD(held, lr=0.5), frozen) == msc.SGD(lr=0.5)
    assert isinstance(as_optimizer(OPTIMIZERS["decoupled"](plain), plain), msc.AdamW)
    assert as_optimizer(None, plain) is None
    assert as_optimizer(msc.SGD(), plain) == msc.SGD()


def test_tied_and_odd_names() -> None:
    plain = nn.ModuleDict({"a[0]": nn.Linear(3, 3, bias=False), "a0": nn.Linear(3, 3, bias=False)})
    plain["tied"] = plain["a[0]"]
    groups = [{"params": plain["a0"].parameters()}, {"params": plain["tied"].parameters(), "lr": 2}]
    found = as_optimizer(torch.optim.SGD(groups, lr=1.0), plain)  # type: ignore[arg-type]
    assert found is not None
    names = {"a[0].weight": (("a[0].weight", "tied.weight"), 2), "a0.weight": (("a0.weight",), 2)}
    assert found.grouped(names) == {"a[0].weight": msc.SGD(lr=2)}


def stepped(m: nn.Module) -> torch.optim.Optimizer:
    found = torch.optim.AdamW(m.parameters())
    m(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
    found.step()
    return found


def scheduled(m: nn.Module) -> torch.optim.Optimizer:
    found = torch.optim.AdamW(m.parameters())
    torch.optim.lr_scheduler.StepLR(found, 10)
    return found


def hooked(m: nn.Module) -> torch.optim.Optimizer:
    found = torch.optim.SGD(m.parameters())
    found.register_step_post_hook(lambda *args: None)
    return found


class Own(torch.optim.SGD):
    """Whose step may be anything."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m: torch.optim.Adagrad(m.parameters()),
            "Adagrad, whose update is not known",
        ),
        (lambda m: Own(m.parameters()), "test_torch_optimizers.Own, whose update is not known"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "group 0: amsgrad=True is not"),
        (
            lambda m: torch.optim.SGD(m.parameters(), maximize=True),
            "maximize=True is not",
        ),
        (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "capturable=True is not"),
        (lambda m: torch.optim.Adam(m.parameters(), differentiable=True), "differentiable=True is"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1)), "lr is a tensor; pass a"),
        (stepped, "The torch.optim.AdamW has stepped already: it holds state of 3 parameters"),
        (scheduled, "a scheduler of torch is attached.*LearningRate.cosine"),
        (hooked, r"hooks around step\(\), which no program calls"),
        (
            lambda m: torch.optim.SGD(model().parameters()),
            r"parameter 0, of shape \[4, 3\]",
        ),
        (
            lambda m: torch.optim.SGD([m[0].weight]),
            "lacks 2 parameters.* such as '0.bias'",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    plain = model()
    with pytest.raises(msc.PlanError, match=message):
        as_optimizer(make(plain), plain)
