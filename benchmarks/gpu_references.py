"""What `gpu_check` compares with: results in float64 by other ops, and torch's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def linear_float64(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias."""
    product = x.double() @ w.double().t()
    return product if bias is None else product + bias.double()


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Which keys queries see, [queries, keys]: themselves and the `window - 1` before them."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device)
    return visible.tril() & ~visible.tril(-window)


def attention_float64(
    q: Tensor, k: Tensor, v: Tensor, gy: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of [b, h, s, d], one sample at a time: all scores would not fit.

    mask: which keys are seen, or what is added to the scores; [b or 1, 1, s or 1, s] or [s, s].
    """
    parts: list[tuple[Tensor, ...]] = []
    for i in range(q.shape[0]):
        leaves = [x[i : i + 1].double().requires_grad_() for x in (q, k, v)]
        copies = q.shape[1] // k.shape[1]
        query, key, value = (leaves[0], *(x.repeat_interleave(copies, 1) for x in leaves[1:]))
        scores = scale * query @ key.transpose(-1, -2)
        if mask is not None and mask.dtype == torch.bool:
            own = mask if mask.dim() < 4 or mask.shape[0] == 1 else mask[i : i + 1]
            scores = scores.masked_fill(~own, float("-inf"))
        elif mask is not None:
            scores = scores + mask.double()
        if causal:
            later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        out = scores.softmax(-1) @ value
        grads = torch.autograd.grad(out, leaves, gy[i : i + 1].double())
        parts.append((out.detach(), scores.detach().logsumexp(-1), *grads))
    return tuple(torch.cat(found) for found in zip(*parts, strict=True))


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, gy: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """torch's attention and its backward, of the same arguments."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    own = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)

    def forward() -> Tensor:
        query, key, value = leaves
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, own, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    out = forward()
    return forward, lambda: torch.autograd.grad(out, leaves, gy, retain_graph=True)


def nll_float64(logits: Tensor, target: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """logsumexp of each row, and the target's logit: 0 where it is not in columns `start ...`."""
    local = target if start is None else target - start
    inside = (local >= 0) & (local < logits.shape[1])
    picked = logits.double().gather(1, local.where(inside, 0).unsqueeze(1)).squeeze(1)
    return logits.double().logsumexp(1), picked.where(inside, 0)


def nll_grad_float64(
    glse: Tensor, gtarget: Tensor, logits: Tensor, target: Tensor, start: Tensor | None
) -> Tensor:
    """The gradient of the logits from those of both terms."""
    leaf = logits.double().requires_grad_()
    terms = nll_float64(leaf, target, start)
    return torch.autograd.grad(terms, leaf, (glse.double(), gtarget.double()))[0]


def adamw_float64(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
    """Parameters and first moments after step 3."""
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g**2
    denominator = (v / (1 - 0.999**3)).sqrt() + 1e-8
    return [p * (1 - 1e-4) - 1e-3 * m / (1 - 0.9**3) / denominator, m]
