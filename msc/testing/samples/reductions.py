"""Sample calls of ops that reduce dims, or need a dim whole and keep it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import ops

from msc.ir.torch_private import OpOverload
from msc.testing.samples.draw import Draw, samples

aten = ops.aten


@samples(
    aten.sum, aten.nansum, aten.nanmean, aten.median, aten.var_mean, aten.std_mean,
    aten.mean, aten.max, aten.min, aten.prod, aten.var, aten.std, aten.any, aten.all,
    aten.count_nonzero, aten.aminmax,
)  # fmt: skip
def _reduce_all(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    while math.prod(shape) == 1:
        shape.append(4)
    if op in (aten.any.default, aten.all.default):
        return (draw.values(shape),)
    return (draw.normal(shape),)


def _reduced(draw: Draw) -> tuple[torch.Tensor, list[int], bool]:
    shape = [max(2, n) for n in draw.shape(1, 3)]
    dims = draw.dims(shape)
    return draw.normal(shape), dims[:1] if draw.flag() else dims, draw.flag()


@samples(aten.sum.dim_IntList, aten.mean.dim)
def _sum(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return x, draw.pick([dims, None, []]), keepdim


@samples(aten.amax, aten.amin, aten.logsumexp, aten.any.dims, aten.all.dims)
def _reduce_dims(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return _reduced(draw)


@samples(aten.var.dim, aten.std.dim, aten.var_mean.dim, aten.std_mean.dim)
def _var(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return x, dims, draw.flag(), keepdim


@samples(
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction
)
def _var_correction(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return (
        x,
        draw.pick([dims[:1], dims, None]),
        {"correction": draw.pick([0, 1]), "keepdim": keepdim},
    )


@samples(
    aten.max.dim, aten.min.dim, aten.any.dim, aten.all.dim, aten.prod.dim_int,
    aten.median.dim, aten.nanmedian.dim, aten.mode,
)  # fmt: skip
def _reduce_dim(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return x, dims[0], keepdim


@samples(aten.argmax, aten.argmin)
def _argmax(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return x, draw.pick([dims[0], None]), keepdim


@samples(aten.linalg_vector_norm, aten.norm.ScalarOpt_dim)
def _norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return x, 2, dims, keepdim


@samples(
    aten.softmax.int, aten.log_softmax.int, aten._safe_softmax,
    aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin, aten.cumsum, aten.special_softmax,
)  # fmt: skip
def _along(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.dim(shape)


@samples(aten.kthvalue)
def _kth_value(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return x, draw.count(1, x.shape[dims[0]]), dims[0], keepdim


@samples(aten.histc)
def _histc(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape(1)), draw.length(), *draw.pick([(), (-1, 1)])


@samples(aten.rot90)
def _rot90(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(2)
    return draw.normal(shape), draw.count(-1, 3), draw.dims(shape, low=2)[:2]


@samples(aten.msort, aten.flipud)
def _along_first(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape(1)),)


@samples(aten.fliplr)
def _along_second(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape(2)),)


@samples(aten._softmax, aten._log_softmax)
def _softmax(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.dim(shape), False


@samples(aten.diff)
def _diff(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = [max(3, n) for n in draw.shape(1, 3)]
    dim = draw.dim(shape)
    before = [1 if d == dim % len(shape) else n for d, n in enumerate(shape)]
    ends = draw.pick([(), (draw.normal(before),), (None, draw.normal(shape))])
    return draw.normal(shape), draw.pick([1, 2]), dim, *ends


@samples(aten.topk)
def _topk(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    return draw.normal(shape), draw.count(1, shape[dim]), dim


@samples(aten.sort, aten.argsort)
def _sort(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.dim(shape), draw.flag()


@samples(aten.sort.stable, aten.argsort.stable)
def _sort_stable(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), {"stable": True, "dim": draw.dim(shape), "descending": draw.flag()}


@samples(aten.flip)
def _flip(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.dims(shape)


@samples(aten.roll)
def _roll(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dims = draw.dims(shape)
    if draw.count(0, 3) == 0:
        return draw.normal(shape), [1]
    return draw.normal(shape), [draw.count(-2, 3) for _ in dims], dims


@samples(aten.tril, aten.triu)
def _triangle(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape(2)), draw.count(-1, 1)
