"""Scaled dot-product attention with its logsumexp, grouped heads, masks and sliding windows.

Layout: `out`, `dq`, `dk` and `dv` are `[b, h, s, d]` views of contiguous `[b, s, h, d]` tensors,
and `lse` is a view of `[b, s, h]`, whatever the layout of the operands. Models compute q, k and v
as transposed views of `[b, s, h, d]` and merge the heads again by `out.transpose(1, 2)` and a
reshape, so that with this layout neither direction copies anything.
"""

# Shape letters: b batch, h query heads, g key-value heads, r = h / g, s queries, t keys,
# d head size of q and k, e head size of v and out.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msc.ir.ops.library import HALF_DTYPES, define

# The public wrapper of this kernel does not return the logsumexp that the backward needs.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q @ k.T + mask) @ v, and the logsumexp of each row.

    q `[b, h, s, d]`, k `[b, g, t, d]`, v `[b, g, t, e]` with h a multiple of g: query head i reads
    key-value head `i // (h / g)`. mask: broadcasts to `[b, h, s, t]`; bool (True is visible) or
    float (added). causal: query i sees keys j <= i, counted from the top left also where s != t,
    as `is_causal` of torch does. window > 0 (needs causal): only keys i - window < j.

    Returns out `[b, h, s, e]` and lse `[b, h, s]` (float32 for half types). A row that sees no key
    gives out 0 and lse 0.
    """
    mask = _additive_mask(q, k, mask, window)
    if _has_flash_kernel(q, v):
        out, lse = _flash(
            _unit_stride(q), _unit_stride(k), _unit_stride(v), 0.0, causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
    else:
        out, lse = _math_forward(q, k, v, mask, scale, causal)
    return _bshd(out), _bshd(lse)


def attention_backward(
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the operands are those of `attention`, gy the gradient of out."""
    mask = _additive_mask(q, k, mask, window)
    if _has_flash_kernel(q, v):
        grads = _flash_backward(
            _unit_stride(gy), _unit_stride(q), _unit_stride(k), _unit_stride(v),
            _unit_stride(out), lse, 0.0, causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
    else:
        grads = _math_backward(gy, q, k, v, out, lse, mask, scale, causal)
    dq, dk, dv = (_bshd(grad) for grad in grads)
    return dq, dk, dv


def _has_flash_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _unit_stride(x: Tensor) -> Tensor:
    # The flash kernel reads the head dim as contiguous without checking that it is.
    return x if x.stride(-1) == 1 else x.contiguous()


def _bshd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_bshd(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    b, h, s, *rest = shape
    return like.new_empty((b, s, h, *rest), dtype=dtype).transpose(1, 2)


def _additive_mask(q: Tensor, k: Tensor, mask: Tensor | None, window: int) -> Tensor | None:
    """The float mask `[.., s, t]` of 2 or 4 dims that stands for `mask` and the window."""
    hidden = None
    if mask is not None and mask.dtype == torch.bool:
        hidden, mask = ~mask, None
    if window > 0:
        rows = torch.arange(q.shape[2], device=q.device).unsqueeze(1)
        before = torch.arange(k.shape[2], device=q.device) <= rows - window
        hidden = before if hidden is None else hidden | before
    if hidden is not None:
        if mask is None:
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
            mask.masked_fill_(hidden, float("-inf"))
        else:
            mask = mask.masked_fill(hidden, float("-inf"))
    if mask is None:
        return None
    if mask.dtype != q.dtype:
        # Half types keep a float32 mask: its smallest number would become -inf.
        mask = mask.to(torch.float32 if q.dtype in HALF_DTYPES else q.dtype)
    missing = 4 - mask.dim()
    mask = mask.reshape((1,) * missing + tuple(mask.shape))
    return _unit_stride(mask)


def _math_scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """scale * q @ k.T + mask: `[b, g, r, s, t]`, hidden keys at -inf."""
    b, h, s, _ = q.shape
    g, t = k.shape[1], k.shape[2]
    grouped = q.reshape(b, g, h // g, s, -1)
    scores = torch.matmul(grouped, k.unsqueeze(2).transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores += mask.expand(b, h, s, t).reshape(b, g, h // g, s, t)
    if causal:
        visible = torch.ones(s, t, dtype=torch.bool, device=q.device).tril_()
        scores.masked_fill_(~visible, float("-inf"))
    return scores


def _widen(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(x.float() if x is not None and x.dtype in HALF_DTYPES else x for x in tensors)


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v, mask = _widen(q, k, v, mask)
    scores = _math_scores(q, k, mask, scale, causal)
    lse = torch.logsumexp(scores, -1)
    lse.masked_fill_(lse == float("-inf"), 0.0)  # exp(-inf - 0) is the 0 that a blind row needs
    probabilities = scores.sub_(lse.unsqueeze(-1)).exp_()
    out = torch.matmul(probabilities, v.unsqueeze(2))
    return out.flatten(1, 2).to(dtype), lse.flatten(1, 2)


def _math_backward(
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, b, g = q.dtype, k.shape[0], k.shape[1]
    gy, q, k, v, out, mask = _widen(gy, q, k, v, out, mask)
    p = _math_scores(q, k, mask, scale, causal)
    p = p.sub_(lse.reshape(b, g, -1, lse.shape[2], 1)).exp_()
    grouped_gy = gy.reshape(b, g, -1, *gy.shape[2:])
    delta = (gy * out).sum(-1).reshape(b, g, -1, gy.shape[2], 1)
    dv = torch.matmul(p.transpose(-1, -2), grouped_gy).sum(2)
    ds = torch.matmul(grouped_gy, v.unsqueeze(2).transpose(-1, -2)).sub_(delta)
    ds = ds.mul_(p).mul_(scale)
    dq = torch.matmul(ds, k.unsqueeze(2)).flatten(1, 2)
    dk = torch.matmul(ds.transpose(-1, -2), q.reshape(b, g, -1, *q.shape[2:])).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    if h % k.shape[1] or k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}: "
            "the heads of q must be a multiple of those of k and v, and the other sizes agree"
        )
    if window < 0 or (window > 0 and not causal):
        raise ValueError(f"attention: window={window} needs causal=True and at least one key")
    lse_dtype = torch.float32 if q.dtype in HALF_DTYPES else q.dtype
    return _empty_bshd(q, (b, h, s, v.shape[3])), _empty_bshd(q, (b, h, s), lse_dtype)


def _attention_backward_fake(
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_bshd(q, tuple(q.shape)),
        _empty_bshd(k, tuple(k.shape)),
        _empty_bshd(v, tuple(v.shape)),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.scale, ctx.causal, ctx.window = inputs
    if mask is not None and mask.requires_grad:
        raise ValueError(
            "attention: the mask requires a gradient, which msc.attention does not compute. "
            "Keep such an attention as separate ops."
        )
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, mask)


def _backward(ctx: Any, gy: Tensor, _glse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, mask = ctx.saved_tensors
    grads = ATTENTION_BACKWARD(gy, q, k, v, out, lse, mask, ctx.scale, ctx.causal, ctx.window)
    return *grads, None, None, None, None


ATTENTION_BACKWARD = define(
    "attention_backward(Tensor gy, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor? mask, float scale, bool causal, int window=0) -> (Tensor dq, Tensor dk, Tensor dv)",
    attention_backward,
    _attention_backward_fake,
)
ATTENTION = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int window=0)"
    " -> (Tensor out, Tensor lse)",
    attention,
    _attention_fake,
    setup=_setup,
    backward=_backward,
)
