"""Scaled dot-product attention with its logsumexp, grouped heads, masks and sliding windows.

Layout: `out`, `dq`, `dk` and `dv` are `[b, h, s, d]` views of contiguous `[b, s, h, d]` tensors,
and `lse` is a view of `[b, s, h]`, whatever the layout of the operands. Models compute q, k and v
as transposed views of `[b, s, h, d]` and merge the heads again by `out.transpose(1, 2)` and a
reshape, so that with this layout neither direction copies anything.
"""

# Shape letters: b batch, h query heads, g key-value heads, r = h / g, s queries, t keys,
# d head size of q and k, e head size of v and out.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msc.ir.ops import attention_bands as bands
from msc.ir.ops import attention_kernels as kernels
from msc.ir.ops.library import compute_dtype, define


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q @ k.T + mask) @ v, and the logsumexp of each row.

    q `[b, h, s, d]`, k `[b, g, t, d]`, v `[b, g, t, e]` with h a multiple of g: query head i reads
    key-value head `i // (h / g)`. mask: broadcasts to `[b, h, s, t]`; bool (True is visible) or
    float (added). causal: query i sees keys j <= i, counted from the top left also where s != t,
    as `is_causal` of torch does. window > 0 (needs causal): only keys i - window < j; time and
    memory grow with s * window then, not with s * t. soft_cap c > 0: scores x are c * tanh(x / c)
    before the mask is added (Gemma 2, 2024, section 2).

    Returns out `[b, h, s, e]` and lse `[b, h, s]` (float32 for half types). A row that sees no key
    gives out 0 and lse 0.
    """
    mask = _of_four_dims(mask)
    width = _band(q, causal, window, soft_cap)
    if width:
        # The fake kernel's results are empty tensors of the right layout.
        out, lse = _attention_fake(q, k, v, mask, scale, causal, window, soft_cap)
        bands.forward(q, k, v, mask, scale, width, soft_cap, out, lse)
        return out, lse
    bias = kernels.additive(mask, None, q)
    out, lse = kernels.forward(q, k, v, bias, scale, causal, soft_cap)
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
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the operands are those of `attention`, gy the gradient of out."""
    mask = _of_four_dims(mask)
    width = _band(q, causal, window, soft_cap)
    if width:
        grads = _empty_bshd(q, q.shape), _empty_bshd(k, k.shape), _empty_bshd(v, v.shape)
        bands.backward(gy, q, k, v, out, lse, mask, scale, width, soft_cap, grads)
        return grads
    bias = kernels.additive(mask, None, q)
    dq, dk, dv = kernels.backward(gy, q, k, v, out, lse, bias, scale, causal, soft_cap)
    return _bshd(dq), _bshd(dk), _bshd(dv)


def _band(q: Tensor, causal: bool, window: int, soft_cap: float) -> int:
    """The window to compute in blocks, or 0 for all at once.

    A window that hides nothing is none. Soft-capped scores have no flash kernel: in blocks not all
    of them are held at once, and those after a block's last query are not computed.
    """
    s = q.shape[2]
    if 0 < window < s:
        return window
    return s if causal and soft_cap else 0


def _of_four_dims(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


def _bshd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_bshd(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    b, h, s, *rest = shape
    return like.new_empty((b, s, h, *rest), dtype=dtype).transpose(1, 2)


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    if h % k.shape[1] or k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}: "
            "the heads of q must be a multiple of those of k and v, and the other sizes agree"
        )
    if window < 0 or (window > 0 and not causal):
        raise ValueError(f"attention: window={window} needs causal=True and at least one key")
    if soft_cap < 0:
        raise ValueError(f"attention: soft_cap={soft_cap} is a bound of scores, or 0 for none")
    lse = _empty_bshd(q, (b, h, s), compute_dtype(q.dtype))
    return _empty_bshd(q, (b, h, s, v.shape[3])), lse


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
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_bshd(q, q.shape), _empty_bshd(k, k.shape), _empty_bshd(v, v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.scale, ctx.causal, ctx.window, ctx.soft_cap = inputs
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
    grads = ATTENTION_BACKWARD(
        gy, q, k, v, out, lse, mask, ctx.scale, ctx.causal, ctx.window, ctx.soft_cap
    )
    return *grads, None, None, None, None, None


ATTENTION_BACKWARD = define(
    "attention_backward(Tensor gy, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor? mask, float scale, bool causal, int window=0, float soft_cap=0.0)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    attention_backward,
    _attention_backward_fake,
)
ATTENTION = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int window=0,"
    " float soft_cap=0.0) -> (Tensor out, Tensor lse)",
    attention,
    _attention_fake,
    setup=_setup,
    backward=_backward,
)
