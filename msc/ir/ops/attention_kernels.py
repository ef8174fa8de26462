"""Attention of some queries to some keys at once: PyTorch's flash kernel on the CPU, or its math.

The math works on all scores `[b, g, r, s, t]`; the flash kernel holds a few rows of them. Shape
letters as in `msc.ir.ops.attention`. Masks are additive, of 4 dims, each equal or 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msc.ir.ops.library import HALF_DTYPES, compute_dtype

# The public wrapper of this kernel does not return the logsumexp that the backward needs.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """out `[b, h, s, e]` and lse `[b, h, s]`, of any strides; both 0 in rows that see no key."""
    if has_flash_kernel(q, v, soft_cap):
        out, lse = _flash(
            _unit_stride(q), _unit_stride(k), _unit_stride(v), 0.0, causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        return out, lse
    dtype = q.dtype
    q, k, v, mask = _widen(q, k, v, mask)
    scores, _ = _scores(q, k, mask, scale, causal, soft_cap)
    lse = torch.logsumexp(scores, -1)
    lse.masked_fill_(lse == float("-inf"), 0.0)  # exp(-inf - 0) is the 0 that a blind row needs
    probabilities = scores.sub_(lse.unsqueeze(-1)).exp_()
    out = torch.matmul(probabilities, v.unsqueeze(2))
    return out.flatten(1, 2).to(dtype), lse.flatten(1, 2)


def backward(
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    soft_cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtypes and of any strides; gy is the gradient of out."""
    if has_flash_kernel(q, v, soft_cap):
        dq, dk, dv = _flash_backward(
            _unit_stride(gy), _unit_stride(q), _unit_stride(k), _unit_stride(v),
            _unit_stride(out), lse, 0.0, causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    dtype, b, g = q.dtype, k.shape[0], k.shape[1]
    gy, q, k, v, out, mask = _widen(gy, q, k, v, out, mask)
    p, capped = _scores(q, k, mask, scale, causal, soft_cap)
    p = p.sub_(lse.reshape(b, g, -1, lse.shape[2], 1)).exp_()
    grouped_gy = gy.reshape(b, g, -1, *gy.shape[2:])
    delta = (gy * out).sum(-1).reshape(b, g, -1, gy.shape[2], 1)
    dv = torch.matmul(p.transpose(-1, -2), grouped_gy).sum(2)
    ds = torch.matmul(grouped_gy, v.unsqueeze(2).transpose(-1, -2)).sub_(delta)
    ds = ds.mul_(p).mul_(scale)
    if capped is not None:
        ds = ds.mul_(capped.square_().neg_().add_(1.0))
    dq = torch.matmul(ds, k.unsqueeze(2)).flatten(1, 2)
    dk = torch.matmul(ds.transpose(-1, -2), q.reshape(b, g, -1, *q.shape[2:])).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def has_flash_kernel(q: Tensor, v: Tensor, soft_cap: float) -> bool:
    """Whether the CPU's flash kernel computes it: it caps no scores, and needs d = e."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and soft_cap == 0.0


def additive(mask: Tensor | None, hidden: Tensor | None, like: Tensor) -> Tensor | None:
    """The additive mask for queries `like` that stands for `mask` and a bool `hidden`, or None."""
    if mask is not None and mask.dtype == torch.bool:
        hidden = ~mask if hidden is None else hidden | ~mask
        mask = None
    if hidden is not None:
        if mask is None:
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(hidden, float("-inf"))
        else:
            mask = mask.masked_fill(hidden, float("-inf"))
    if mask is None:
        return None
    if mask.dtype != like.dtype:
        # Half types keep a float32 mask: its smallest number would become -inf.
        mask = mask.to(compute_dtype(like.dtype))
    return _unit_stride(mask)


def _unit_stride(x: Tensor) -> Tensor:
    # The flash kernel reads the last dim as contiguous without checking that it is.
    return x if x.stride(-1) == 1 else x.contiguous()


def _widen(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(x.float() if x is not None and x.dtype in HALF_DTYPES else x for x in tensors)


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool, soft_cap: float
) -> tuple[Tensor, Tensor | None]:
    """Scores with hidden keys at -inf, and with a soft cap the tanh that its gradient needs."""
    b, h, s, _ = q.shape
    g, t = k.shape[1], k.shape[2]
    grouped = q.reshape(b, g, h // g, s, -1)
    scores = torch.matmul(grouped, k.unsqueeze(2).transpose(-1, -2)).mul_(scale)
    capped = None
    if soft_cap:
        capped = scores.div_(soft_cap).tanh_()
        scores = capped * soft_cap
    if mask is not None:
        scores += mask.expand(b, h, s, t).reshape(b, g, h // g, s, t)
    if causal:
        visible = torch.ones(s, t, dtype=torch.bool, device=q.device).tril_()
        scores.masked_fill_(~visible, float("-inf"))
    return scores, capped
