"""linear and its gradients against torch's own, for both layouts of the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from msc.ir.torch_private import FakeTensorMode

_msc = torch.ops.msc


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_equals_torch(
    transposed: bool, bias: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    w = torch.randn((4, 5) if transposed else (5, 4), dtype=dtype, requires_grad=True)
    b = torch.randn(5, dtype=dtype, requires_grad=True) if bias else None
    variables = [value for value in (x, w, b) if value is not None]
    y = _msc.linear(x, w, b, transposed)
    expected = functional.linear(x, w.t() if transposed else w, b)
    gy = torch.randn_like(y)
    # Both multiply the same numbers; the order of additions may differ.
    close: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13} if dtype == torch.float64 else {}
    torch.testing.assert_close(y, expected, **close)
    torch.testing.assert_close(
        torch.autograd.grad(y, variables, gy),
        torch.autograd.grad(expected, variables, gy),
        **close,
    )


def test_only_needed_gradients_are_computed_and_saved() -> None:
    x = torch.randn(2, 4)
    w = torch.randn(5, 4, requires_grad=True)
    y = _msc.linear(x, w)
    saved = y.grad_fn.saved_tensors
    assert [tensor is None for tensor in saved] == [False, True]
    frozen = _msc.linear(x.requires_grad_(), w.detach())
    assert [tensor is None for tensor in frozen.grad_fn.saved_tensors] == [True, False]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=r"x \(2, 4\), w \(4, 5\)"):
        _msc.linear(torch.empty(2, 4), torch.empty(4, 5))
