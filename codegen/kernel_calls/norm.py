"""LayerNorm, forward and backward: `aten.native_layer_norm` and its gradient.

The statistics that the forward keeps are those of ATen's op, mean and 1 / std of each row, in the
dtype that it has for them (on the CPU that of x, on CUDA float32 for half types): the backward of
either kind may follow the forward of the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, name_of
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
    if gy.dtype != x.dtype:
        raise PlanError(f"norm: kernels take one dtype, not {name_of(gy.dtype)} for its gradient")
    backward = norm.emit_backward(own)
    partial = () if own.sums_in_backward else (norm.emit_weight_gradient(own),)
    total = column_sums.emit(own.programs, own.width, own.dtype, target)

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
        size = (own.programs, own.width)
        sums = {name: x.new_empty(size, dtype=torch.float32) for name in parts}
        launches: list[tuple[Kernel, dict[str, Any]]] = []
        inside = {} if partial else sums
        launches.append((backward, known | {"weight": dense(weight), "dx": dx} | inside))
        launches += [(kernel, known | sums) for kernel in partial]
        launches += [(total, {"parts": sums[name], "total": parts[name]}) for name in parts]
        results = zip((dx, dw, db), wanted, strict=True)
        return launches, tuple(value if want else None for value, want in results)

    return Plan((backward, *partial, total), run)


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
    operands = (x, weight) if bias is None else (x, weight, bias)
    found = {name_of(value.dtype) for value in operands}
    if len(found) > 1:
        raise PlanError(f"norm: kernels take one dtype, not {' and '.join(sorted(found))}")
    width = math.prod(normalized_shape)
    if not x.numel():
        raise PlanError("norm: there are no rows")
    dtype = name_of(x.dtype)
    statistics = dtype if target.interpreted else "float32"
    shift = bias is not None
    rows = x.numel() // width
    return Norm("layer", rows, width, dtype, target, eps, shift=shift, statistics=statistics)
