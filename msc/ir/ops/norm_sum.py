"""The residual sum before a norm, and the sum behind its gradient, as one op with the norm.

Graphs have them once they are differentiated (`fuse-norm-sums`), so they have no gradients. Here
they are their sequences, bit for bit; a kernel does each in the norm's own pass.
"""

# Shape letters: `...` the rows, n what is normalized over.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msc.ir.ops.library import compute_dtype, define
from msc.ir.ops.norm import rms_norm, rms_norm_backward


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and residual `[..., n]` -> their sum, and `aten.native_layer_norm` of it: y, mean, rstd."""
    summed = torch.add(x, residual).contiguous()
    y, mean, rstd = torch.native_layer_norm(summed, list(normalized_shape), weight, bias, eps)
    return summed, y, mean, rstd


def add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_layer_norm`, whose sum overwrites x."""
    summed = x.add_(residual)
    y, mean, rstd = torch.native_layer_norm(summed, list(normalized_shape), weight, bias, eps)
    return summed, y, mean, rstd


def layer_norm_backward_add(
    gy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    with_weight: bool,
    with_bias: bool,
    other: Tensor,
) -> list[Tensor]:
    """`aten.native_layer_norm_backward`, whose gradient of x `[..., n]` is added to `other`.

    Then the gradients of weight and bias, those that are asked for.
    """
    wanted = [True, with_weight, with_bias]
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        gy, x, list(normalized_shape), mean, rstd, weight, bias, wanted
    )
    rest = [value for value, want in ((dw, with_weight), (db, with_bias)) if want]
    return [dx.add_(other).contiguous(), *rest]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x and residual `[..., n]` -> their sum, and `rms_norm` of it: y, rstd."""
    summed = torch.add(x, residual).contiguous()
    return summed, *rms_norm(summed, weight, eps)


def add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm`, whose sum overwrites x."""
    summed = x.add_(residual)
    return summed, *rms_norm(summed, weight, eps)


def rms_norm_backward_add(
    gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    """`rms_norm_backward`, whose gradient of x is added to `other`."""
    dx, dw = rms_norm_backward(gy, x, weight, rstd)
    return dx.add_(other), dw


def _check_sum(op: str, x: Tensor, other: Tensor) -> None:
    if x.shape != other.shape or x.dtype != other.dtype:
        raise ValueError(
            f"{op}: {other.dtype} {tuple(other.shape)} is not of the shape and dtype of "
            f"{x.dtype} {tuple(x.shape)}, with which it is summed"
        )


def _add_layer_norm_fake(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_sum("add_layer_norm", x, residual)
    summed = x.new_empty(x.shape)
    # the dtype of the statistics is the device's
    return summed, *torch.native_layer_norm(summed, list(normalized_shape), weight, bias, eps)


def _layer_norm_backward_add_fake(
    gy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    with_weight: bool,
    with_bias: bool,
    other: Tensor,
) -> list[Tensor]:
    _check_sum("layer_norm_backward_add", x, other)
    rest = [with_weight, with_bias].count(True)
    return [x.new_empty(x.shape), *(x.new_empty(list(normalized_shape)) for _ in range(rest))]


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_sum("add_rms_norm", x, residual)
    rstd = x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


def _rms_norm_backward_add_fake(
    gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    _check_sum("rms_norm_backward_add", x, other)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


ADD_LAYER_NORM = define(
    "add_layer_norm(Tensor x, Tensor residual, int[] normalized_shape, Tensor? weight,"
    " Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    add_layer_norm,
    _add_layer_norm_fake,
)
LAYER_NORM_BACKWARD_ADD = define(
    "layer_norm_backward_add(Tensor gy, Tensor x, int[] normalized_shape, Tensor mean, Tensor rstd,"
    " Tensor? weight, Tensor? bias, bool with_weight, bool with_bias, Tensor other) -> Tensor[]",
    layer_norm_backward_add,
    _layer_norm_backward_add_fake,
)
ADD_RMS_NORM = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    add_rms_norm,
    _add_rms_norm_fake,
)
RMS_NORM_BACKWARD_ADD = define(
    "rms_norm_backward_add(Tensor gy, Tensor x, Tensor weight, Tensor rstd, Tensor other)"
    " -> (Tensor, Tensor)",
    rms_norm_backward_add,
    _rms_norm_backward_add_fake,
)
