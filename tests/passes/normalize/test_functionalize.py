from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msc.capture.entry import capture
from msc.ir.errors import CaptureError
from tests.passes.normalize.one_op import Function, normalized, random


def add_to_itself(y: Tensor) -> Tensor:
    z = y * 1
    z += y
    return z * z


def write_row(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[1] = y[0] * 2
    z[:, 1:3] = y[:, :2]
    return z * y


def write_through_transpose(y: Tensor) -> Tensor:
    z = y * 1
    z.t()[2].mul_(y[:, 0])
    return z + y


def write_through_view(y: Tensor) -> Tensor:
    z = y * 1
    z.view(-1)[5] = 3.0
    return z * y


def masked_fill(y: Tensor) -> Tensor:
    z = y * 2
    z.masked_fill_(y > 0, -1.0)
    return z * y


def write_twice(y: Tensor) -> Tensor:
    z = y * 1
    row = z[0]
    row.add_(1)
    row.mul_(y[1])
    return z * row


def reader_before_the_write(y: Tensor) -> Tensor:
    z = y * 1
    before = z + 1
    z.zero_()
    return before + z


def keeps_the_dtype(y: Tensor) -> Tensor:
    z = torch.zeros(y.shape, dtype=torch.float32)
    z.add_(torch.ones(y.shape, dtype=torch.float64))
    return y * z


def index_put(y: Tensor) -> Tensor:
    z = y * 1
    z[torch.tensor([0, 2]), torch.tensor([1, 1])] = y[0, :2]
    return z


def fill_and_copy(y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    z.fill_(2.0)
    z[0].copy_(y[1])
    z[2].copy_(y[0, 0])
    return z * y


@pytest.mark.parametrize(
    "function",
    [
        add_to_itself,
        write_row,
        write_through_transpose,
        write_through_view,
        masked_fill,
        write_twice,
        reader_before_the_write,
        keeps_the_dtype,
        index_put,
        fill_and_copy,
    ],
)
def test_writes_get_a_functional_form(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    normalized(lambda w, x: function(x * w).sum(), [random(4)], [random(3, 4)])


def other_view(y: Tensor) -> Tensor:
    z = y * 1
    half = z[1:]
    z.mul_(2)
    return half


def diagonal(y: Tensor) -> Tensor:
    z = y * 1
    z.diagonal().mul_(2)
    return z


def write_to_parameter(w: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(0.5)
    return w


@pytest.mark.parametrize(
    ("function", "message"),
    [(other_view, "another view of that memory is read"), (diagonal, "writes through")],
)
def test_writes_without_one_are_refused(function: Callable[[Tensor], Tensor], message: str) -> None:
    model = Function(lambda w, x: function(x * w).sum(), [random(4)])
    with pytest.raises(CaptureError, match=message) as error:
        capture(model, (random(3, 4),))
    assert "one_op.py:" in str(error.value)  # the line in forward


def test_writes_to_parameters_are_refused() -> None:
    model = Function(lambda w, x: (write_to_parameter(w) * x).sum(), [random(4)])
    with pytest.raises(CaptureError, match=r"Parameter 'weights\.0' is changed in place"):
        capture(model, (random(3, 4),))
