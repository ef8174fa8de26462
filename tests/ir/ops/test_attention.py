"""attention against torch's scaled_dot_product_attention and against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from msc.ir.ops import attention_kernels as kernels
from msc.ir.torch_private import FakeTensorMode

_msc = torch.ops.msc

MASKS: dict[str, tuple[int, ...]] = {
    "none": (),
    "rows": (5, 1),
    "keys": (7,),
    "plane": (5, 7),
    "heads": (4, 5, 7),
    "padding": (2, 1, 1, 7),
    "batch": (2, 1, 5, 7),
    "full": (2, 4, 5, 7),
}


def operands(
    groups: int = 4, dtype: torch.dtype = torch.float64, s: int = 5, t: int = 7, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, s, 8), (2, groups, t, 8), (2, groups, t, 8)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def visible(s: int, t: int, causal: bool, window: int) -> Tensor:
    keys, queries = torch.arange(t), torch.arange(s).unsqueeze(1)
    seen = torch.ones(s, t, dtype=torch.bool)
    if causal:
        seen &= keys <= queries
    if window:
        seen &= keys > queries - window
    return seen


def formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention as it is written in books, every score kept; blind rows give 0."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = scale * q @ k.transpose(-1, -2)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    hidden = ~seen.expand_as(scores) | (scores == float("-inf"))
    blind = hidden.all(-1)
    scores = scores.masked_fill(hidden, float("-inf")).masked_fill(blind.unsqueeze(-1), 0.0)
    lse = scores.logsumexp(-1).masked_fill(blind, 0.0)
    out = (scores.softmax(-1) @ v).masked_fill(blind.unsqueeze(-1), 0.0)
    return out, lse


def make_mask(name: str, kind: str) -> Tensor | None:
    if name == "none":
        return None
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(MASKS[name], generator=generator, dtype=torch.float64)
    # The first row of queries (or keys) is partly or wholly hidden.
    if kind == "bool":
        return noise > 0
    return noise.masked_fill(noise < -0.5, float("-inf")) if kind == "infinite" else noise


@pytest.fixture(params=["flash", "math"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute it: the CPU's kernel, and the formula that other devices run."""
    if request.param == "math":
        monkeypatch.setattr(kernels, "has_flash_kernel", lambda q, v, soft_cap: False)
    return str(request.param)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 1), (True, 3)])
@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
@pytest.mark.parametrize("name", MASKS)
def test_equals_formula(
    path: str, name: str, kind: str, causal: bool, window: int, groups: int
) -> None:
    q, k, v = operands(groups)
    mask = make_mask(name, kind)
    out, lse = _msc.attention(q, k, v, mask, 0.3, causal, window)
    expected, expected_lse = formula(q, k, v, mask, 0.3, visible(5, 7, causal, window))
    gy = torch.randn_like(expected)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), gy),
        torch.autograd.grad(expected, (q, k, v), gy),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize(("s", "t"), [(5, 5), (5, 7), (7, 5)])
def test_causal_is_that_of_torch(path: str, s: int, t: int) -> None:
    q, k, v = operands(s=s, t=t)
    out, _ = _msc.attention(q, k, v, None, 8**-0.5, True)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32, "same"])
def test_narrow_types_keep_their_precision(
    path: str, dtype: torch.dtype, mask_dtype: torch.dtype | str | None
) -> None:
    q, k, v = operands(2, dtype)
    mask = None
    if mask_dtype is not None:
        plane = torch.ones(5, 7).tril()
        mask = plane.to(dtype if isinstance(mask_dtype, str) else mask_dtype)
    out, lse = _msc.attention(q, k, v, mask, 0.3, True)
    wide = [value.detach().double().requires_grad_() for value in (q, k, v)]
    wide_mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    expected, expected_lse = formula(
        wide[0], wide[1], wide[2], wide_mask, 0.3, visible(5, 7, True, 0)
    )
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    # One rounding of the result and of the probabilities each.
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.double(), expected, **close)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wide_grads = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    for grad, wide_grad in zip(grads, wide_grads, strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), wide_grad, **close)


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(4)), st.permutations(range(4)), st.permutations(range(4)), st.data())
def test_any_layout_of_the_operands(
    q_order: list[int], k_order: list[int], gy_order: list[int], data: st.DataObject
) -> None:
    """Layouts change no number, and no stride of the results."""

    def stored(value: Tensor, order: list[int]) -> Tensor:
        inverse = [order.index(dim) for dim in range(4)]
        return value.detach().permute(order).contiguous().permute(inverse).requires_grad_()

    q, k, v = operands()
    expanded = data.draw(st.booleans())
    gy = torch.ones(()).double().expand(2, 4, 5, 8) if expanded else torch.randn_like(q)
    laid_out = stored(q, q_order), stored(k, k_order), stored(v, k_order)
    out, lse = _msc.attention(q, k, v, None, 0.3, True)
    same, same_lse = _msc.attention(*laid_out, None, 0.3, True)
    assert torch.equal(out, same)
    assert (out.stride(), lse.stride()) == (same.stride(), same_lse.stride())
    grads = torch.autograd.grad(out, (q, k, v), gy)
    same_gy = gy if expanded else stored(gy, gy_order).detach()
    for grad, other in zip(grads, torch.autograd.grad(same, laid_out, same_gy), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-13, atol=1e-13)
        assert grad.stride() == other.stride()


def test_merging_heads_copies_nothing() -> None:
    q, k, v = (value.detach() for value in operands())
    out, _ = _msc.attention(q, k, v, None, 0.3, True)
    merged = out.transpose(1, 2).reshape(2, 5, 32)
    assert merged.data_ptr() == out.data_ptr()


def test_what_has_no_meaning_is_refused() -> None:
    with FakeTensorMode():
        q, k = torch.empty(2, 4, 5, 8), torch.empty(2, 3, 5, 8)
        with pytest.raises(ValueError, match="heads of q must be a multiple"):
            _msc.attention(q, k, k, None, 1.0, True)
        with pytest.raises(ValueError, match="window=3 needs causal=True"):
            _msc.attention(q, q, q, None, 1.0, False, 3)
    mask = torch.zeros(5, 7, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="mask requires a gradient"):
        _msc.attention(*operands(), mask, 1.0, False)
