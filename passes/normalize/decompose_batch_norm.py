"""Write batch norm in train mode as sums over the batch, and its running statistics as updates.

    %y = aten.batch_norm(%x, %w, %b, %running_mean, %running_var, True, 0.1, 1e-5)
      ->  %mean = msc.training_value(aten.mean(%x, [0]), %running_mean)
          %centered = %x - %mean
          %var = msc.training_value(aten.mean(%centered * %centered, [0]), %running_var)
          %y = %centered * rsqrt(%var + 1e-5) * %w + %b
          copy_(%running_mean, %running_mean * 0.9 + %mean * 0.1)

so that the rules shard it like any other sum: over dp the statistics are those of all ranks' rows.
Numerics: may change by rounding; half types are computed in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.errors import CaptureError
from msc.ir.values import where
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    calls,
    named_arguments,
    replace,
    shape_of,
)

_DEFAULTS = {"weight": None, "bias": None, "running_mean": None, "running_var": None}


def decompose_batch_norm(gm: fx.GraphModule) -> int:
    """Decompose every batch norm that uses the statistics of the batch; returns their number."""
    found = [
        node
        for node in calls(gm, aten.batch_norm.default)
        if named_arguments(node, dict(_DEFAULTS))["training"]
    ]
    for node in found:
        replace(node, _decomposed(Emitter(gm, node), node))
    return len(found)


def _decomposed(emit: Emitter, node: fx.Node) -> fx.Node:
    args = named_arguments(node, dict(_DEFAULTS))
    shape, dtype = shape_of(node), node.meta["val"].dtype
    dims = [dim for dim in range(len(shape)) if dim != 1]
    count = math.prod(shape[dim] for dim in dims)
    if count < 2:
        raise CaptureError(
            f"Batch norm at {where(node)} has one value per channel (shape {list(shape)}): its "
            "variance does not exist. Use a larger batch."
        )
    column = [shape[1] if dim == 1 else 1 for dim in range(len(shape))]
    x = args["input"]
    if dtype.itemsize < torch.float32.itemsize:
        x = emit(aten.to.dtype, x, torch.float32)
    mean = _training(emit, emit(aten.mean.dim, x, dims, True), args["running_mean"], column)
    centered = emit(aten.sub.Tensor, x, mean)
    square = emit(aten.mul.Tensor, centered, centered)
    var = _training(emit, emit(aten.mean.dim, square, dims, True), args["running_var"], column)
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, var, args["eps"]))
    result = emit(aten.mul.Tensor, centered, scale)
    for target, operand in ((aten.mul.Tensor, args["weight"]), (aten.add.Tensor, args["bias"])):
        if operand is not None:
            view = emit(aten.reshape.default, operand, column, shape=column)
            result = emit(target, result, view)
    for running, value, factor in (
        (args["running_mean"], mean, 1.0),
        (args["running_var"], var, count / (count - 1)),
    ):
        if running is not None:
            _update(emit, running, value, args["momentum"], factor)
    return result if result.meta["val"].dtype == dtype else emit(aten.to.dtype, result, dtype)


def _training(emit: Emitter, value: fx.Node, running: Any, column: list[int]) -> fx.Node:
    """The statistic of the batch, marked for evaluation if there is a running one."""
    if running is None:
        return value
    view = emit(aten.reshape.default, running, column, shape=column)
    if view.meta["val"].dtype != value.meta["val"].dtype:
        view = emit(aten.to.dtype, view, value.meta["val"].dtype)
    return emit(torch.ops.msc.training_value.default, value, view)


def _update(
    emit: Emitter, running: fx.Node, value: fx.Node, momentum: float, factor: float
) -> None:
    """`running = running * (1 - momentum) + value * factor * momentum`, as a write to it."""
    own = shape_of(running)
    statistic = emit(aten.reshape.default, emit(aten.detach.default, value), list(own), shape=own)
    new = emit(
        aten.add.Tensor,
        emit(aten.mul.Tensor, running, 1.0 - momentum),
        emit(aten.mul.Tensor, statistic, factor * momentum),
    )
    emit(aten.copy_.default, running, new)
