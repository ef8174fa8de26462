"""Windows and soft caps: blocks of queries give what all scores with a mask give."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import msc.ir.ops  # noqa: F401  registers torch.ops.msc
from msc.ir.ops import attention_bands, attention_kernels

_msc = torch.ops.msc


def operands(s: int, t: int, groups: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(17 * s + t)
    shapes = [(2, 4, s, 4), (2, groups, t, 4), (2, groups, t, 4)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [value.to(dtype).requires_grad_() for value in made]


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """All scores, then a mask; a query that sees no key gives 0."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = 0.5 * q @ k.mT
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    rows, columns = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2])
    hidden = (columns > rows) | (columns <= rows - window)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask
    hidden = hidden.expand_as(scores)
    blind = hidden.all(-1)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(blind.unsqueeze(-1), 0.0)
    lse = scores.logsumexp(-1).masked_fill(blind, 0.0)
    return (scores.softmax(-1) @ v).masked_fill(blind.unsqueeze(-1), 0.0), lse


def make_mask(kind: str, s: int, t: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(s + t)
    shapes = {"slopes": (4, 1, t), "plane": (s, t), "padding": (2, 1, 1, t), "full": (2, 4, s, t)}
    if kind == "none":
        return None
    noise = torch.randn(shapes[kind], generator=generator, dtype=torch.float64)
    return noise > -0.5 if kind in ("plane", "padding") else noise


@pytest.mark.parametrize("flash", [True, False])
@settings(deadline=None, max_examples=40)
@given(
    s=st.integers(1, 13),
    t=st.integers(1, 13),
    window=st.integers(1, 15),
    length=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 4]),
    soft_cap=st.sampled_from([0.0, 0.7]),
    kind=st.sampled_from(["none", "slopes", "plane", "padding", "full"]),
)
def test_blocks_equal_a_mask(
    flash: bool, s: int, t: int, window: int, length: int, groups: int, soft_cap: float, kind: str
) -> None:
    q, k, v = operands(s, t, groups)
    mask = make_mask(kind, s, t)
    expected, expected_lse = dense(q, k, v, mask, window, soft_cap)
    gy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    kernel = attention_kernels.has_flash_kernel if flash else lambda *_: False
    with (
        mock.patch.object(attention_bands, "block_length", return_value=length),
        mock.patch.object(attention_kernels, "has_flash_kernel", kernel),
    ):
        out, lse = _msc.attention(q, k, v, mask, 0.5, True, window, soft_cap)
        grads = torch.autograd.grad(out, (q, k, v), gy)
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(lse, expected_lse.detach(), **close)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (q, k, v), gy), **close)
    assert out.transpose(1, 2).is_contiguous()
    assert all(grad.transpose(1, 2).is_contiguous() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_narrow_types_keep_their_precision(dtype: torch.dtype, soft_cap: float) -> None:
    """Also of the sums of a key's gradients over blocks."""
    q, k, v = operands(201, 201, 2, dtype)
    wide = [value.detach().double().requires_grad_() for value in (q, k, v)]
    out, lse = _msc.attention(q, k, v, None, 0.5, True, 33, soft_cap)
    expected, expected_lse = dense(wide[0], wide[1], wide[2], None, 33, soft_cap)
    gy = torch.ones_like(out)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(out, expected, **close)
    assert lse.dtype == torch.float32
    precise = 1e-5 if dtype == torch.float32 else 1e-3  # the flash kernel adds in steps
    close_lse: dict[str, Any] = {"rtol": precise, "atol": precise, "check_dtype": False}
    torch.testing.assert_close(lse, expected_lse.detach(), **close_lse)
    grads = torch.autograd.grad(out, (q, k, v), gy)
    assert {grad.dtype for grad in grads} == {dtype}
    wide_grads = torch.autograd.grad(expected, wide, gy.double())
    torch.testing.assert_close(grads, wide_grads, **close)


def test_equal_operands_give_equal_bits() -> None:
    q, k, v = operands(150, 150, 2, torch.float32)
    results = []
    for _ in range(2):
        out, lse = _msc.attention(q, k, v, None, 0.5, True, 40)
        results.append([out, lse, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(("s", "t"), [(1000, 1000), (1000, 300), (300, 1000)])
@pytest.mark.parametrize("window", [1, 100, 600])
def test_blocks_hold_what_a_query_sees_and_little_more(s: int, t: int, window: int) -> None:
    bands = attention_bands.bands(s, t, window)
    seen = torch.zeros(s, t, dtype=torch.bool)
    for band in bands:
        seen[band.queries, band.keys] = True
    rows, columns = torch.arange(s).unsqueeze(1), torch.arange(t)
    assert bool(seen[(columns <= rows) & (columns > rows - window)].all())
    assert int(seen.sum()) <= s * (window + attention_bands.block_length(window))
    assert [row for band in bands for row in range(s)[band.queries]] == [*range(s)]


def test_a_window_that_hides_nothing_is_none() -> None:
    q, k, v = operands(9, 9)
    out, _ = _msc.attention(q, k, v, None, 0.5, True)
    for window in (9, 100):
        assert torch.equal(out, _msc.attention(q, k, v, None, 0.5, True, window)[0])


def test_a_soft_cap_without_causality() -> None:
    q, k, v = operands(5, 7)
    out, _ = _msc.attention(q, k, v, None, 0.5, False, 0, 0.7)
    expected = (0.7 * torch.tanh(0.5 * q @ k.mT / 0.7)).softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_a_negative_soft_cap_is_refused() -> None:
    q, k, v = (value.detach().to("meta") for value in operands(5, 5))
    with pytest.raises(ValueError, match="soft_cap=-1"):
        _msc.attention(q, k, v, None, 0.5, True, 0, -1.0)
