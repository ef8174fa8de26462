"""Linear layers: `x @ w.T + b`, and with `transposed` (weight stored `[k, n]`) `x @ w + b`.

Forward, input gradient, weight gradient and bias gradient are one node each, so that schedules can
move the weight gradient and sharding sees one contraction.
"""

# Shape letters: `...` any leading dims, k input features, n output features.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msc.ir.ops.library import define


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, transposed: bool = False) -> Tensor:
    """x `[..., k]`, w `[n, k]` (transposed: `[k, n]`), b `[n]` -> `[..., n]`."""
    if not transposed:
        return functional.linear(x, w, b).contiguous()
    x_2d = _rows(x)
    y_2d = torch.mm(x_2d, w) if b is None else torch.addmm(b, x_2d, w)
    return y_2d.view(*x.shape[:-1], w.shape[1])


def linear_dgrad(
    gy: Tensor, w: Tensor, transposed: bool = False, sum_with: Tensor | None = None
) -> Tensor:
    """Gradient of x: gy `[..., n]` -> `[..., k]`; plus `sum_with` `[..., k]`, if it is given."""
    weight = w.t() if transposed else w
    if sum_with is None:
        gx_2d = torch.mm(_rows(gy), weight)
    else:
        gx_2d = torch.addmm(_rows(sum_with), _rows(gy), weight)
    return gx_2d.view(*gy.shape[:-1], gx_2d.shape[1])


def add_linear_dgrad_(total: Tensor, gy: Tensor, w: Tensor, transposed: bool = False) -> Tensor:
    """`linear_dgrad` with `sum_with`, which is overwritten where its layout allows it."""
    if not total.is_contiguous():
        return linear_dgrad(gy, w, transposed, total)
    total.view(-1, total.shape[-1]).addmm_(_rows(gy), w.t() if transposed else w)
    return total


def linear_wgrad(gy: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
    """Gradient of w: gy `[..., n]`, x `[..., k]` -> `[n, k]` (transposed: `[k, n]`)."""
    gy_2d, x_2d = _rows(gy), _rows(x)
    return torch.mm(x_2d.t(), gy_2d) if transposed else torch.mm(gy_2d.t(), x_2d)


def linear_bgrad(gy: Tensor) -> Tensor:
    """Gradient of b: gy `[..., n]` -> `[n]`."""
    return _rows(gy).sum(0)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _linear_fake(x: Tensor, w: Tensor, b: Tensor | None = None, transposed: bool = False) -> Tensor:
    n, k = (w.shape[1], w.shape[0]) if transposed else (w.shape[0], w.shape[1])
    if x.shape[-1] != k or (b is not None and tuple(b.shape) != (n,)):
        raise ValueError(
            f"linear: x {tuple(x.shape)}, w {tuple(w.shape)} (transposed={transposed}) and "
            f"b {None if b is None else tuple(b.shape)} do not fit together"
        )
    return x.new_empty((*x.shape[:-1], n))


def _linear_dgrad_fake(
    gy: Tensor, w: Tensor, transposed: bool = False, sum_with: Tensor | None = None
) -> Tensor:
    return gy.new_empty((*gy.shape[:-1], w.shape[0] if transposed else w.shape[1]))


def _linear_wgrad_fake(gy: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
    n, k = gy.shape[-1], x.shape[-1]
    return gy.new_empty((k, n) if transposed else (n, k))


def _linear_bgrad_fake(gy: Tensor) -> Tensor:
    return gy.new_empty((gy.shape[-1],))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, b, ctx.transposed = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    # A tensor is saved only if a gradient reads it: a frozen weight must not keep the activation.
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
    ctx.needs_b = b is not None and b.requires_grad


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    gx = None if w is None else LINEAR_DGRAD(gy, w, ctx.transposed)
    gw = None if x is None else LINEAR_WGRAD(gy, x, ctx.transposed)
    gb = LINEAR_BGRAD(gy) if ctx.needs_b else None
    return gx, gw, gb, None


LINEAR_DGRAD = define(
    "linear_dgrad(Tensor gy, Tensor w, bool transposed=False, Tensor? sum_with=None) -> Tensor",
    linear_dgrad,
    _linear_dgrad_fake,
)
LINEAR_WGRAD = define(
    "linear_wgrad(Tensor gy, Tensor x, bool transposed=False) -> Tensor",
    linear_wgrad,
    _linear_wgrad_fake,
)
LINEAR_BGRAD = define("linear_bgrad(Tensor gy) -> Tensor", linear_bgrad, _linear_bgrad_fake)
LINEAR = define(
    "linear(Tensor x, Tensor w, Tensor? b=None, bool transposed=False) -> Tensor",
    linear,
    _linear_fake,
    setup=_setup,
    backward=_backward,
)
