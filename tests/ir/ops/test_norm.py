"""rms_norm against torch's, and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import msc.ir.ops  # noqa: F401  registers the ops

RMS_NORM = torch.ops.msc.rms_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
def test_equals_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gy = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(6).to(dtype)
    leaves = [value.clone().requires_grad_() for value in (x, weight)]
    y, rstd = RMS_NORM(*leaves, 1e-3)
    assert y.dtype == dtype
    assert rstd.dtype == torch.promote_types(dtype, torch.float32)
    assert rstd.shape == shape[:-1]
    assert not rstd.requires_grad
    found = torch.autograd.grad(y, leaves, gy)
    wide = [value.double().requires_grad_() for value in (x, weight)]
    expected = functional.rms_norm(wide[0], (6,), wide[1], 1e-3)
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(y, expected.to(dtype), **close)
    for one, other in zip(found, torch.autograd.grad(expected, wide, gy.double()), strict=True):
        torch.testing.assert_close(one, other.to(dtype), **close)


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"rms_norm: x torch.float32 \(4, 6\) needs a weight"):
        RMS_NORM(torch.zeros(4, 6, device="meta"), torch.zeros(5, device="meta"), 1e-3)
