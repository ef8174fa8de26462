"""`msc.linear_nll_terms` and its gradient: a head whose logits are never in memory.

The gradient takes a part of the vocabulary at a time, as ATen's form does: a kernel writes the
gradient of its logits, and two products make of it the weight's gradient, complete, and an addend
of that of x, which is summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, name_of, one_dtype, rows
from msc.codegen.kernels import gemm, linear_cross_entropy
from msc.codegen.kernels.description import Kernel, Target
from msc.codegen.kernels.epilogue import Epilogue
from msc.codegen.kernels.gemm import Gemm
from msc.codegen.kernels.linear_cross_entropy import LinearCrossEntropy
from msc.codegen.kernels.tiles import head_tiles, product_tiles
from msc.ir.errors import PlanError
from msc.ir.ops.linear_loss import CPU_LOGITS_BYTES, DEVICE_LOGITS_BYTES, columns_at_once

_SUMMED = "float32"


def linear_nll_terms(
    target: Target,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    start: Tensor | None = None,
    transposed: bool = False,
    soft_cap: float = 0.0,
) -> Plan:
    """lse and target_logit, float64 `[...]`."""
    _check(x, w, b, transposed)
    loss = _loss(target, x, w.shape[0], soft_cap)
    terms, combine = linear_cross_entropy.emit_terms(loss), linear_cross_entropy.emit_combine(loss)

    def run(
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        labels: Tensor,
        start: Tensor | None = None,
        transposed: bool = False,
        soft_cap: float = 0.0,
    ) -> tuple[Launches, tuple[Tensor, Tensor]]:
        lse, found = (x.new_empty(labels.shape, dtype=torch.float64) for _ in range(2))
        size = (loss.columns, loss.m)
        highest, total = (x.new_empty(size, dtype=torch.float32) for _ in range(2))
        values = {"target": dense(labels), "start": _first(start)}
        values |= {"highest": highest, "total": total, "target_logit": found}
        factors = {"x": rows(x), "w": dense(w)}
        return [(terms, values | factors), (combine, values | {"lse": lse})], (lse, found)

    return Plan((terms, combine), run)


def linear_nll_terms_backward(
    target: Target,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    glse: Tensor,
    gtarget: Tensor,
    start: Tensor | None,
    transposed: bool,
    soft_cap: float,
    wanted: Sequence[bool],
) -> Plan:
    """The gradients of x and w, those that are wanted."""
    _check(x, w, b, transposed)
    m, v = x.numel() // x.shape[-1], w.shape[0]
    budget = CPU_LOGITS_BYTES if target.interpreted else DEVICE_LOGITS_BYTES
    columns = min(v, columns_at_once(m, x.element_size(), budget))
    parts = [slice(first, min(first + columns, v)) for first in range(0, v, columns)]
    widths = dict.fromkeys(part.stop - part.start for part in parts)
    kernels = {width: _Part(target, x, width, soft_cap, wanted) for width in widths}

    def run(
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        labels: Tensor,
        lse: Tensor,
        glse: Tensor,
        gtarget: Tensor,
        start: Tensor | None,
        transposed: bool,
        soft_cap: float,
        wanted: Sequence[bool],
    ) -> tuple[Launches, list[Tensor]]:
        x_rows, weight = rows(x), dense(w)
        known = {"x": x_rows, "target": dense(labels), "lse": dense(lse)}
        known |= {"g_lse": dense(glse), "g_target": dense(gtarget)}
        space = x.new_empty(m * columns)
        dx = x.new_zeros(x.shape, dtype=getattr(torch, _SUMMED)) if wanted[0] else None
        dw = w.new_empty(w.shape) if wanted[1] else None
        launches: list[tuple[Kernel, dict[str, Any]]] = []
        for part in parts:
            own = kernels[part.stop - part.start]
            gradient = space[: m * own.width].view(m, own.width)
            here = {"w": weight[part], "start": _first(start) + part.start, "gradient": gradient}
            launches.append((own.gradient, known | here))
            if dx is not None:
                total = dx.view(x_rows.shape)
                values = {"a": gradient, "b": weight[part], "c": total, "residual": total}
                launches.append((own.of_x, values))
            if dw is not None:
                launches.append((own.of_w, {"a": gradient, "b": x_rows, "c": dw[part]}))
        return launches, [each for each in (dx, dw) if each is not None]

    def finish(found: list[Tensor]) -> list[Tensor]:
        return [found[0].to(x.dtype), *found[1:]] if wanted[0] else found

    return Plan(tuple(k for own in kernels.values() for k in own.all), run, finish=finish)


class _Part:
    """The kernels of a part of the vocabulary of so many columns."""

    def __init__(
        self, target: Target, x: Tensor, width: int, soft_cap: float, wanted: Sequence[bool]
    ) -> None:
        loss = _loss(target, x, width, soft_cap)
        dtype, added = loss.dtype, Epilogue(residual=True)
        size, across = (loss.m, loss.k, width), (width, loss.k, loss.m)
        tiles = product_tiles(target, size, dtype, added)
        of_x = Gemm(*size, dtype, target, tiles, b_layout="kn", epilogue=added, stored=_SUMMED)
        tiles = product_tiles(target, across, dtype, Epilogue())
        of_w = Gemm(*across, dtype, target, tiles, "km", "kn")
        self.width = width
        self.gradient = linear_cross_entropy.emit_gradient(loss)
        self.of_x = gemm.emit(of_x)
        self.of_w = gemm.emit(of_w)
        products = zip((self.of_x, self.of_w), wanted[:2], strict=True)
        self.all = (self.gradient, *(kernel for kernel, is_wanted in products if is_wanted))


def _check(x: Tensor, w: Tensor, b: Tensor | None, transposed: bool) -> None:
    one_dtype("head with its loss", x, w, b)
    if b is not None:
        raise PlanError("head with its loss: the kernels add no bias")
    if transposed:
        raise PlanError("head with its loss: the kernels read a weight [v, k], not [k, v]")
    if not x.numel() * w.numel():
        raise PlanError("head with its loss: there are no logits")


def _loss(target: Target, x: Tensor, width: int, soft_cap: float) -> LinearCrossEntropy:
    k = x.shape[-1]
    size, dtype = (x.numel() // k, width, k), name_of(x.dtype)
    return LinearCrossEntropy(*size, dtype, target, head_tiles(target, size, dtype), soft_cap)


def _first(start: Tensor | None) -> int:
    # it follows from a rank's coordinate, which is on the CPU: to read it waits for nothing
    return 0 if start is None else int(start)
