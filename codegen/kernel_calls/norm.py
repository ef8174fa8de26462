"""LayerNorm, forward and backward: `aten.native_layer_norm` and its gradient.

The statistics that the forward keeps are those of ATen's op: mean and 1 / std of each row, in the
dtype that the graph says; what the backward of either kind reads may come from the other's forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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

    def run(
        x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Launches, tuple[Tensor, Tensor, Tensor]]:
        x = dense(x)
        y = x.new_empty(x.shape)
        kept = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        mean, rstd = (x.new_empty(kept) for _ in range(2))
        values = {"x": x, "weight": dense(weight), "bias": dense(bias), "y": y}
        return [(kernel, values | {"mean": mean, "rstd": rstd})], (y, mean, rstd)

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

    def run(
        gy: Tensor,
        x: Tensor,
        shape: Sequence[int],
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor,
        bias: Tensor,
        wanted: Sequence[bool],
    ) -> tuple[Launches, tuple[Tensor | None, ...]]:
        known: dict[str, Any] = {"gy": dense(gy), "x": dense(x)}
        known |= {"mean": dense(mean), "rstd": dense(rstd)}
        dx = x.new_empty(x.shape)
        sums = {
            name: x.new_empty((own.programs, own.width), dtype=mean.dtype)
            for name in ("dw_parts", "db_parts")
        }
        launches: list[tuple[Kernel, dict[str, Any]]] = []
        inside = {} if partial else sums
        launches.append((backward, known | {"weight": dense(weight), "dx": dx} | inside))
        launches += [(kernel, known | sums) for kernel in partial]
        dw, db = (x.new_empty(weight.shape) for _ in range(2))
        for parts, result in zip(sums.values(), (dw, db), strict=True):
            launches.append((total, {"parts": parts, "total": result}))
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
    if weight is None or bias is None:
        raise PlanError("norm: the kernel has a weight and a bias, and this LayerNorm lacks one")
    found = {name_of(value.dtype) for value in (x, weight, bias)}
    if len(found) > 1:
        raise PlanError(f"norm: kernels take one dtype, not {' and '.join(sorted(found))}")
    width = math.prod(normalized_shape)
    if not x.numel():
        raise PlanError("norm: there are no rows")
    return Norm("layer", x.numel() // width, width, name_of(x.dtype), target, eps)
