"""A head with its loss against the two ops that it replaces, in parts of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from msc.ir.ops import linear_loss as module
from msc.runtime.memory.meter import StorageMeter

_msc = torch.ops.msc
V, K = 17, 4
LABELS = torch.tensor([[3, 19, -100], [5, 0, 21]])  # with start=4: here, here, in no part, ...


@pytest.fixture(params=[4, 8, 32])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Five parts, three parts with a shorter last one, or all at once."""
    monkeypatch.setattr(module, "LEAST_COLUMNS", request.param)
    monkeypatch.setattr(module, "CPU_LOGITS_BYTES", 0)
    return int(request.param)


def operands(
    dtype: torch.dtype, transposed: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, K).to(dtype).requires_grad_()
    w = torch.randn(*((K, V) if transposed else (V, K))).to(dtype).requires_grad_()
    return x, w, torch.randn(V).to(dtype).requires_grad_() if bias else None


def both(
    dtype: torch.dtype, transposed: bool, bias: bool, start: int | None, soft_cap: float
) -> tuple[list[Tensor], list[Tensor]]:
    """lse, target logit and the gradients of all operands: of the op, and of its parts."""
    begin = None if start is None else torch.tensor(start)
    weights = torch.randn(2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for fused in (True, False):
        x, w, b = operands(dtype, transposed, bias)
        if fused:
            terms = _msc.linear_nll_terms(x, w, b, LABELS, begin, transposed, soft_cap)
        else:
            logits = _msc.linear(x, w, b, transposed)
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            terms = _msc.nll_terms(logits, LABELS, begin)
        leaves = [leaf for leaf in (x, w, b) if leaf is not None]
        found = torch.autograd.grad(terms, leaves, list(weights))
        for leaf, gradient in zip(leaves, found, strict=True):
            assert (gradient.shape, gradient.dtype) == (leaf.shape, dtype)
        results.append([*terms, *found])
    return results[0], results[1]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("start", "soft_cap"), [(None, 0.0), (4, 0.0), (4, 1.5)])
def test_equals_the_ops_that_it_replaces(
    columns: int, transposed: bool, bias: bool, start: int | None, soft_cap: float
) -> None:
    found, wanted = both(torch.float64, transposed, bias, start, soft_cap)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(columns: int, dtype: torch.dtype) -> None:
    for one, other in zip(*both(dtype, False, True, 4, 0.0), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_half_types_sum_the_gradient_of_x_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 parts that each add 1 / 256 of what is there, a sum in bfloat16 would keep none."""
    monkeypatch.setattr(module, "LEAST_COLUMNS", 1)
    monkeypatch.setattr(module, "CPU_LOGITS_BYTES", 0)
    x, w = torch.zeros(1, 1).bfloat16(), torch.full((65, 1), 2**-8).bfloat16()
    w[0] = 1.0
    lse = torch.zeros(1, dtype=torch.float64)
    one, none = torch.ones_like(lse), torch.zeros_like(lse)
    known = (x, w, None, torch.tensor([0]), lse, one, none, None, False, 0.0)
    (dx,) = _msc.linear_nll_terms_backward(*known, [True, False, False])  # all logits are 0
    assert dx.item() == 1.25


def test_a_row_that_is_impossible_everywhere(columns: int) -> None:
    x, w = torch.ones(1, 1), torch.full((V, 1), float("-inf"))
    lse, picked = _msc.linear_nll_terms(x, w, None, torch.tensor([-100]))
    assert (lse.item(), picked.item()) == (float("-inf"), 0.0)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, True), (False, False, True)]
)
def test_only_what_is_wanted_is_made(wanted: tuple[bool, bool, bool]) -> None:
    x, w, b = operands(torch.float64, False, True)
    leaves = (x, w, b)
    for leaf, is_wanted in zip(leaves, wanted, strict=True):
        assert leaf is not None
        leaf.requires_grad_(is_wanted)
    lse, picked = _msc.linear_nll_terms(x, w, b, LABELS)
    (lse - picked).sum().backward()
    assert tuple(leaf is not None and leaf.grad is not None for leaf in leaves) == wanted
    one = torch.ones(2, 3, dtype=torch.float64)
    with torch.no_grad():
        known = (x, w, b, LABELS, lse, one, -one, None, False, 0.0)
        found = _msc.linear_nll_terms_backward(*known, list(wanted))
    expected = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
    assert len(found) == len(expected)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)


def test_all_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_LOGITS_BYTES", 4 * 256 * 64)
    m, v = 64, 8192  # 2 MiB of logits, 64 KiB of them at once
    x, w, labels = torch.randn(m, 8), torch.randn(v, 8), torch.zeros(m, dtype=torch.int64)
    with StorageMeter([x, w, labels]) as meter, torch.no_grad():
        before = meter.live
        lse, picked = _msc.linear_nll_terms(x, w, None, labels)
        assert meter.peak - before < 4 * 64 * 1024
        known = (x, w, None, labels, lse, lse, picked, None, False, 0.0, [True, True, False])
        _msc.linear_nll_terms_backward(*known)
    assert meter.peak - before < w.nbytes + 6 * 64 * 1024


def test_how_many_columns_fit() -> None:
    assert module.columns_at_once(8, 4, 4 * 8 * 700) == 5 * 128
    assert module.columns_at_once(10**9, 4, 1) == 128


BAD: list[tuple[tuple[Any, ...], str]] = [
    ((torch.zeros(2, 4), torch.zeros(5, 3), None, torch.zeros(2).long()), "do not fit"),
    ((torch.zeros(2, 4), torch.zeros(5, 4), None, torch.zeros(2).long(), None, True), "do not fit"),
    ((torch.zeros(4), torch.zeros(5, 4), None, torch.tensor(0)), "do not fit"),
    ((torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(4), torch.zeros(2).long()), "do not fit"),
    ((torch.zeros(2, 4), torch.zeros(5, 4), None, torch.zeros(2).int()), "labels torch.int32"),
    ((torch.zeros(2, 4), torch.zeros(5, 4).half(), None, torch.zeros(2).long()), "several dtypes"),
    (
        (torch.zeros(2, 4), torch.zeros(5, 4), None, torch.zeros(2).long(), None, False, -1.0),
        r"soft_cap is -1.0",
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_does_not_fit(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module._linear_nll_terms_fake(*given)
