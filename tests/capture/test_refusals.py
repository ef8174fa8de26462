"""What a captured graph would leave out is refused, with the name of what has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import msc


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).pow(2).mean()  # type: ignore[no-any-return]


class Hooked(Mean):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y.pow(2).mean()  # type: ignore[no-any-return]


def _on_a_parameter() -> nn.Module:
    model = Mean()
    model.linear.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    return model


def _on_a_module() -> nn.Module:
    model = Mean()
    model.linear.register_full_backward_hook(lambda *_: None)
    return model


BATCH = (torch.zeros(4, 4),)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Hooked(), "tensor.register_hook is called at "),
        (_on_a_parameter(), "Parameter 'linear.weight' has a hook on its gradients"),
        (_on_a_module(), "Module 'linear' has a hook on its gradients"),
        (None, "The model is a NoneType"),
        (nn.Sequential(nn.LazyLinear(3)), "Parameter '0.weight' is uninitialized"),
    ],
)
def test_refused(model: Any, said: str) -> None:
    with pytest.raises(msc.CaptureError) as error:
        msc.compile(model, BATCH)
    assert said in str(error.value)
    assert torch.Tensor.register_hook.__name__ == "register_hook"


@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2"])
def test_a_label_that_is_no_class_makes_the_loss_nan(mesh: str) -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(self.linear(x), labels)

    torch.manual_seed(0)
    x, labels = torch.randn(4, 4), torch.tensor([0, 5, -100, 2])
    program = msc.compile(Classes(), (x, labels), mesh=mesh)
    assert program.run_virtual((x, labels)).loss.isfinite()
    for wrong in (6, -1):
        bad = labels.clone()
        bad[1] = wrong
        assert program.run_virtual((x, bad)).loss.isnan()
