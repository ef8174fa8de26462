"""LayerNorm and the root mean square norm: `aten.native_layer_norm`, `msc.rms_norm`, gradients.

The statistics that the forward keeps are those of the op, mean and 1 / std of each row: the
backward of either kind may follow the forward of the other. ATen has them on the CPU in the dtype
of x, on CUDA in float32 for half types; `msc.rms_norm` in float32 for half types everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, is_dense, one_dtype
from msc.codegen.kernels import column_sums, norm
from msc.codegen.kernels.description import Kernel, Target
from msc.codegen.kernels.norm import Norm
from msc.ir.errors import PlanError


def layer_norm(
    target: Target,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Plan:
    """`native_layer_norm`: y, mean and rstd."""
    own = _norm(target, x, normalized_shape, weight, bias, eps)
    kernel = norm.emit_forward(own)
    kept = getattr(torch, own.statistics)

    def run(
        x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Launches, tuple[Tensor, Tensor, Tensor]]:
        y = x.new_empty(x.shape)
        leading = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        mean, rstd = (x.new_empty(leading, dtype=kept) for _ in range(2))
        values = {"x": dense(x), "weight": dense(weight), "y": y, "mean": mean, "rstd": rstd}
        if bias is not None:
            values["bias"] = dense(bias)
        return [(kernel, values)], (y, mean, rstd)

    return Plan((kernel,), run)


def add_layer_norm(
    target: Target,
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Plan:
    """`msc.add_layer_norm`: the sum, y, mean and rstd."""
    own = replace(_norm(target, x, normalized_shape, weight, bias, eps), residual=True)
    one_dtype("norm", x, residual)
    kernel = norm.emit_forward(own)
    kept = getattr(torch, own.statistics)

    def into(
        summed: Tensor,
        x: Tensor,
        residual: Tensor,
        shape: Sequence[int],
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Launches, tuple[Tensor, Tensor, Tensor, Tensor]]:
        y = x.new_empty(x.shape)
        leading = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        mean, rstd = (x.new_empty(leading, dtype=kept) for _ in range(2))
        values = {"x": dense(x), "residual": dense(residual), "weight": dense(weight)}
        values |= {"y": y, "summed": summed, "mean": mean, "rstd": rstd}
        if bias is not None:
            values["bias"] = dense(bias)
        return [(kernel, values)], (summed, y, mean, rstd)

    def run(x: Tensor, *rest: Any) -> tuple[Launches, tuple[Tensor, Tensor, Tensor, Tensor]]:
        return into(x.new_empty(x.shape), x, *rest[:-1])

    def over(x: Tensor, *rest: Any) -> tuple[Launches, tuple[Tensor, Tensor, Tensor, Tensor]]:
        # a row of x is read before the sum is written there
        return into(x if is_dense(x) else x.new_empty(x.shape), x, *rest[:-1])

    return Plan((kernel,), run, over)


def layer_norm_backward(
    target: Target,
    gy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Plan:
    """`native_layer_norm_backward`: the gradients of x, weight and bias that are asked for."""
    own = _norm(target, x, normalized_shape, weight, bias, 0.0)
    one_dtype("norm", x, gy)
    kernels = _Backward(own)
    kept = getattr(torch, own.statistics)

    def run(
        gy: Tensor,
        x: Tensor,
        shape: Sequence[int],
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Sequence[bool],
    ) -> tuple[Launches, tuple[Tensor | None, ...]]:
        known = {"gy": dense(gy), "x": dense(x)}
        known |= {"mean": dense(mean.to(kept)), "rstd": dense(rstd.to(kept))}
        dx = x.new_empty(x.shape)
        dw = x.new_empty(weight.shape)
        db = None if bias is None else x.new_empty(weight.shape)
        parts = {"dw_parts": dw} | ({} if db is None else {"db_parts": db})
        launches = kernels.launches(known, weight, dx, parts)
        results = zip((dx, dw, db), wanted, strict=True)
        return launches, tuple(value if want else None for value, want in results)

    return Plan(kernels.all, run)


def layer_norm_backward_add(
    target: Target,
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
) -> Plan:
    """`msc.layer_norm_backward_add`: the gradient of the sum, then of weight and bias."""
    own = replace(_norm(target, x, normalized_shape, weight, bias, 0.0), residual=True)
    one_dtype("norm", x, gy, other)
    kernels = _Backward(own)
    kept = getattr(torch, own.statistics)

    def run(
        gy: Tensor,
        x: Tensor,
        shape: Sequence[int],
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        with_weight: bool,
        with_bias: bool,
        other: Tensor,
    ) -> tuple[Launches, list[Tensor]]:
        known = {"gy": dense(gy), "x": dense(x)}
        known |= {"mean": dense(mean.to(kept)), "rstd": dense(rstd.to(kept))}
        dx = x.new_empty(x.shape)
        dw = x.new_empty(weight.shape)
        db = None if bias is None else x.new_empty(weight.shape)
        parts = {"dw_parts": dw} | ({} if db is None else {"db_parts": db})
        launches = kernels.launches(known, weight, dx, parts, other)
        results = [dx, *[dw] * with_weight]
        return launches, [*results, db] if with_bias and db is not None else results

    return Plan(kernels.all, run)


def rms_norm(target: Target, x: Tensor, weight: Tensor, eps: float) -> Plan:
    """`msc.rms_norm`: y and rstd."""
    own = _rms(target, x, weight, eps)
    kernel = norm.emit_forward(own)

    def run(x: Tensor, weight: Tensor, eps: float) -> tuple[Launches, tuple[Tensor, Tensor]]:
        y = x.new_empty(x.shape)
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
        values = {"x": dense(x), "weight": dense(weight), "y": y, "rstd": rstd}
        return [(kernel, values)], (y, rstd)

    return Plan((kernel,), run)


def rms_norm_backward(target: Target, gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Plan:
    """`msc.rms_norm_backward`: the gradients of x and weight."""
    one_dtype("norm", x, gy)
    own = _rms(target, x, weight, 0.0)
    kernels = _Backward(own)

    def run(
        gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Launches, tuple[Tensor, Tensor]]:
        dx, dw = x.new_empty(x.shape), x.new_empty(weight.shape)
        known = {"gy": dense(gy), "x": dense(x), "rstd": dense(rstd)}
        return kernels.launches(known, weight, dx, {"dw_parts": dw}), (dx, dw)

    return Plan(kernels.all, run)


def add_rms_norm(target: Target, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Plan:
    """`msc.add_rms_norm`: the sum, y and rstd."""
    own = replace(_rms(target, x, weight, eps), residual=True)
    one_dtype("norm", x, residual)
    kernel = norm.emit_forward(own)

    def into(
        summed: Tensor, x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Launches, tuple[Tensor, Tensor, Tensor]]:
        y = x.new_empty(x.shape)
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
        values = {"x": dense(x), "residual": dense(residual), "weight": dense(weight)}
        return [(kernel, values | {"y": y, "summed": summed, "rstd": rstd})], (summed, y, rstd)

    def run(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Launches, tuple[Tensor, Tensor, Tensor]]:
        return into(x.new_empty(x.shape), x, residual, weight)

    def over(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Launches, tuple[Tensor, Tensor, Tensor]]:
        # a row of x is read before the sum is written there
        return into(x if is_dense(x) else x.new_empty(x.shape), x, residual, weight)

    return Plan((kernel,), run, over)


def rms_norm_backward_add(
    target: Target, gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, other: Tensor
) -> Plan:
    """`msc.rms_norm_backward_add`: the gradients of the sum and of weight."""
    one_dtype("norm", x, gy, other)
    own = replace(_rms(target, x, weight, 0.0), residual=True)
    kernels = _Backward(own)

    def run(
        gy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, other: Tensor
    ) -> tuple[Launches, tuple[Tensor, Tensor]]:
        dx, dw = x.new_empty(x.shape), x.new_empty(weight.shape)
        known = {"gy": dense(gy), "x": dense(x), "rstd": dense(rstd)}
        return kernels.launches(known, weight, dx, {"dw_parts": dw}, other), (dx, dw)

    return Plan(kernels.all, run)


class _Backward:
    """The kernels of a norm's gradients: of x, of parts of weight and bias, and their sums."""

    def __init__(self, own: Norm) -> None:
        self.own = own
        self.rows = norm.emit_backward(own)
        self.parts = () if own.sums_in_backward else (norm.emit_weight_gradient(own),)
        self.total = column_sums.emit(own.programs, own.width, own.dtype, own.target)
        self.all = (self.rows, *self.parts, self.total)

    def launches(
        self,
        known: dict[str, Tensor],
        weight: Tensor,
        dx: Tensor,
        wanted: dict[str, Tensor],
        other: Tensor | None = None,
    ) -> Launches:
        """known: what all of them read; wanted: what is summed, by the name of its parts.

        other: what dx is added to.
        """
        size = (self.own.programs, self.own.width)
        sums = {name: dx.new_empty(size, dtype=torch.float32) for name in wanted}
        inside = {} if self.parts else dict(sums)
        if other is not None:
            inside["g_summed"] = dense(other)
        found: list[tuple[Kernel, dict[str, Any]]] = [
            (self.rows, known | {"weight": dense(weight), "dx": dx} | inside)
        ]
        found += [(kernel, known | sums) for kernel in self.parts]
        found += [(self.total, {"parts": sums[name], "total": wanted[name]}) for name in wanted]
        return found


def _rms(target: Target, x: Tensor, weight: Tensor, eps: float) -> Norm:
    if not x.numel():
        raise PlanError("norm: there are no rows")
    width = x.shape[-1]
    dtype = one_dtype("norm", x, weight)
    return Norm("rms", x.numel() // width, width, dtype, target, eps)


def _norm(
    target: Target,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Norm:
    if weight is None:
        raise PlanError("norm: the kernel scales by a weight, and this LayerNorm has none")
    dtype = one_dtype("norm", x, weight, bias)
    width = math.prod(normalized_shape)
    if not x.numel():
        raise PlanError("norm: there are no rows")
    statistics = dtype if target.interpreted else "float32"
    shift = bias is not None
    rows = x.numel() // width
    return Norm("layer", rows, width, dtype, target, eps, shift=shift, statistics=statistics)
