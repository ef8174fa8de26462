"""nll_terms against cross_entropy, whole and with the vocabulary in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from msc.ir.ops import loss as module

_msc = torch.ops.msc


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    lse, target_logit = _msc.nll_terms(logits, target)
    return torch.where(target != -100, lse - target_logit, 0.0)


@pytest.fixture(params=[1, 10, 1 << 18])
def block_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One row, several and all rows at a time; 6 rows of 7 columns."""
    monkeypatch.setattr(module, "_CPU_BLOCK_ELEMENTS", 2 * request.param)
    return int(request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_cross_entropy(block_elements: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(2, 3, 7)).to(dtype).requires_grad_()
    target = torch.tensor([[0, 6, -100], [3, -100, 2]])
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = functional.cross_entropy(wide.view(-1, 7), target.view(-1), reduction="none")
    found = cross_entropy(logits, target).view(-1)
    assert found.dtype == torch.float64
    found = found.to(wide.dtype)
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(found, expected, **close)
    weight = torch.randn(6, dtype=wide.dtype)
    (grad,) = torch.autograd.grad(found, logits, weight)
    (wide_grad,) = torch.autograd.grad(expected, wide, weight)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, wide_grad.to(dtype), **close)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_the_vocabulary_combine(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 7, -100, 3, 4, 100])
    parts = [
        _msc.nll_terms(part, target, torch.tensor(index * (8 // size)))
        for index, part in enumerate(logits.chunk(size, 1))
    ]
    lse = torch.stack([part for part, _ in parts]).logsumexp(0)
    target_logit = sum(part for _, part in parts)
    whole_lse, whole_logit = _msc.nll_terms(logits, target)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-14, atol=1e-14)
    assert torch.equal(target_logit, whole_logit)
    weight = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(lse - 2 * target_logit, logits, weight),
        torch.autograd.grad(whole_lse - 2 * whole_logit, logits, weight),
        rtol=1e-13,
        atol=1e-14,
    )


def test_a_part_without_any_allowed_column_has_gradient_zero() -> None:
    logits = torch.full((2, 4), float("-inf"), requires_grad=True)
    lse, target_logit = _msc.nll_terms(logits, torch.tensor([9, 9]), torch.tensor(4))
    assert lse.tolist() == [float("-inf")] * 2
    (grad,) = torch.autograd.grad([lse, target_logit], logits, [torch.ones(2), torch.ones(2)])
    assert torch.equal(grad, torch.zeros(2, 4))


def test_other_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="target int64"):
        module._nll_terms_fake(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))
