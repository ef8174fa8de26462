"""The root mean square norm (Zhang and Sennrich, 2019, equation 4), with its statistic.

As one op it keeps x and one number per row for the backward; written out it keeps a normalized copy
of x as well.
"""

# Shape letters: `...` the rows, n what is normalized over.

from __future__ import annotations

from typing import Any

from torch import Tensor

from msc.ir.ops.library import compute_dtype, define


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x `[..., n]`, weight `[n]` -> `x * rstd * weight` `[..., n]`, and rstd `[...]`.

    rstd is 1 / sqrt(mean(x^2) + eps) of each row, in float32 for half types, whose result is
    rounded once.
    """
    wide = x.to(compute_dtype(x.dtype))
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = (wide * rstd).mul_(weight)
    return y.to(x.dtype).contiguous(), rstd.squeeze(-1).contiguous()


def rms_norm_backward(gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; gy is that of y, the other operands are those of `rms_norm`."""
    dtype, wide = x.dtype, compute_dtype(x.dtype)
    scale = rstd.unsqueeze(-1)
    normalized = x.to(wide) * scale
    gy = gy.to(wide)
    slope = gy * weight
    along = (slope * normalized).mean(-1, keepdim=True)
    dw = (gy * normalized).flatten(0, -2).sum(0) if x.dim() > 1 else gy * normalized
    dx = slope.sub_(normalized.mul_(along)).mul_(scale)
    return dx.to(dtype).contiguous(), dw.to(weight.dtype)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dim() == 0 or tuple(weight.shape) != (x.shape[-1],) or weight.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: x {x.dtype} {tuple(x.shape)} needs a weight of its dtype and last dim, not "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))


def _rms_norm_backward_fake(
    gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, rstd)


def _backward(ctx: Any, gy: Tensor, _grstd: Tensor | None) -> tuple[Tensor | None, ...]:
    return *RMS_NORM_BACKWARD(gy, *ctx.saved_tensors), None


RMS_NORM_BACKWARD = define(
    "rms_norm_backward(Tensor gy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor dw)",
    rms_norm_backward,
    _rms_norm_backward_fake,
)
RMS_NORM = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
    rms_norm,
    _rms_norm_fake,
    setup=_setup,
    backward=_backward,
)
