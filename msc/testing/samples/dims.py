"""Sample calls of ops that rearrange, join, index and reduce dims."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import ops

from msc.ir.torch_private import OpOverload
from msc.testing.samples.draw import Draw, samples

aten = ops.aten


def _regrouped(draw: Draw, shape: list[int]) -> list[int]:
    """A shape with as many elements: dims merged, taken apart, with ones inserted, or unrelated."""
    if 0 in shape:
        return shape
    merged: list[int] = []
    for length in shape:
        if merged and draw.flag():
            merged[-1] *= length
        else:
            merged.append(length)
    result: list[int] = []
    for length in merged:
        divisors = [d for d in range(1, length + 1) if length % d == 0]
        first = draw.pick(divisors) if draw.flag() else length
        result += [first, length // first] if first != length or draw.flag() else [length]
    return result


@samples(aten.view, aten._unsafe_view, aten.reshape)
def _view(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    size = _regrouped(draw, shape)
    if draw.flag() and size and op is not aten._unsafe_view.default:
        size[draw.count(0, len(size) - 1)] = -1
    return draw.normal(shape), size


@samples(aten.view_as, aten.reshape_as)
def _view_as(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(_regrouped(draw, shape))


@samples(aten.flatten.using_ints)
def _flatten(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    first = draw.count(0, len(shape) - 1)
    return draw.normal(shape), first, draw.count(first, len(shape) - 1) - len(shape)


@samples(aten.unflatten.int)
def _unflatten(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    length = shape[dim]
    first = draw.pick([d for d in range(1, length + 1) if length % d == 0])
    return draw.normal(shape), dim, draw.pick([[first, length // first], [-1, first]])


@samples(aten.unsqueeze)
def _unsqueeze(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.count(-len(shape) - 1, len(shape))


def _with_ones(draw: Draw) -> list[int]:
    return [1 if draw.flag() else length for length in draw.shape(1)]


@samples(aten.squeeze)
def _squeeze(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(_with_ones(draw)),)


@samples(aten.squeeze.dim)
def _squeeze_dim(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = _with_ones(draw)
    return draw.normal(shape), draw.dim(shape)


@samples(aten.squeeze.dims)
def _squeeze_dims(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = _with_ones(draw)
    return draw.normal(shape), draw.dims(shape)


@samples(aten.permute)
def _permute(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.dims(shape, low=len(shape))


@samples(aten.transpose.int, aten.swapaxes, aten.swapdims)
def _transpose(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.dim(shape), draw.dim(shape)


@samples(aten.movedim.int)
def _movedim(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.dim(shape), draw.dim(shape)


@samples(aten.movedim.intlist)
def _movedims(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(2)
    return draw.normal(shape), draw.dims(shape)[:1], draw.dims(shape)[:1]


@samples(aten.t, aten.numpy_T)
def _t(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape(0, 2)),)


@samples(aten.mT, aten.adjoint)
def _matrix_t(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape(2)),)


def _expansion(draw: Draw) -> tuple[list[int], list[int]]:
    size = draw.shape(1)
    return draw.broadcast(size), size


@samples(aten.expand)
def _expand(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape, size = _expansion(draw)
    new = len(size) - len(shape)
    asked = [-1 if d >= new and draw.flag() and shape[d - new] == size[d] else size[d]
             for d in range(len(size))]  # fmt: skip
    return draw.normal(shape), asked


@samples(aten.broadcast_to)
def _broadcast_to(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape, size = _expansion(draw)
    return draw.normal(shape), size


@samples(aten.expand_as)
def _expand_as(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape, size = _expansion(draw)
    return draw.normal(shape), draw.normal(size)


@samples(aten.repeat)
def _repeat(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(0, 3)
    counts = [draw.pick([1, 2, 3, 6]) for _ in range(len(shape) + draw.count(0, 1))]
    return draw.normal(shape), counts


@samples(aten.repeat_interleave.self_int)
def _repeat_interleave(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    return draw.normal(shape), draw.pick([1, 2, 3, 6]), draw.dim(shape)


@samples(aten.split.Tensor)
def _split(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.pick([1, 2, 3, 4, 6]), draw.dim(shape)


@samples(aten.split_with_sizes, aten.split.sizes)
def _split_sizes(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    dim = draw.dim(shape)
    sizes = [draw.pick([0, 2, 2, 4, 6]) for _ in range(draw.count(1, 3))]
    shape[dim] = sum(sizes)
    return draw.normal(shape), sizes, dim


@samples(aten.chunk)
def _chunk(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    dim = draw.dim(shape)
    shape[dim] = draw.pick([1, 2, 6, 10, 12, 16, 18])
    return draw.normal(shape), draw.count(1, 5), dim


@samples(aten.unbind.int)
def _unbind(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    return draw.normal(shape), draw.dim(shape)


@samples(aten.cat, aten.concat)
def _cat(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    dim = draw.dim(shape)
    parts = []
    for _ in range(draw.count(1, 3)):
        shape[dim] = draw.pick([0, 2, 2, 4, 6])
        parts.append(draw.normal(shape))
    return parts, dim


@samples(aten.broadcast_tensors)
def _broadcast_tensors(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    parts = [draw.normal(shape)]
    for _ in range(draw.count(0, 2)):
        own = [length if draw.count(0, 2) else 1 for length in shape]
        parts.append(draw.normal(own[draw.count(0, len(own)) :]))
    return (parts,)


@samples(aten.stack)
def _stack(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(0, 3)
    parts = [draw.normal(shape) for _ in range(draw.count(1, 3))]
    return parts, draw.count(-len(shape) - 1, len(shape))


@samples(aten.select.int)
def _select(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    return draw.normal(shape), dim, draw.count(-shape[dim], shape[dim] - 1)


@samples(aten.slice.Tensor)
def _slice(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    ends = [(0, 2**63 - 1), (0, shape[dim]), (None, None), (0, -1), (1, 3), (-2, 2**63 - 1)]
    start, end = draw.pick(ends)
    return draw.normal(shape), dim, start, end, draw.pick([1, 1, 2])


@samples(aten.narrow)
def _narrow(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    start = draw.count(0, shape[dim] - 1)
    return draw.normal(shape), dim, start, draw.count(1, shape[dim] - start)


@samples(aten.constant_pad_nd)
def _pad(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    pads = [draw.count(0, 2) for _ in range(2 * draw.count(1, len(shape)))]
    return draw.normal(shape), pads, draw.pick([0, 1.5])


@samples(aten.pad)
def _pad_mode(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    if draw.flag():
        return draw.normal([2, 6, 4]), [1, 1], draw.pick(["reflect", "replicate"])
    shape = draw.shape(1)
    return draw.normal(shape), [draw.count(0, 2), 0], "constant", draw.pick([None, 0.0, 1.0])


@samples(aten.index_select)
def _index_select(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    index_shape = draw.pick([[draw.length()], []])
    return draw.normal(shape), dim, draw.integers(index_shape, shape[dim])


@samples(aten.index.Tensor)
def _index(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    common = draw.shape(0, 2)
    indexed = {d % len(shape) for d in draw.dims(shape)}
    indices = [
        draw.integers(draw.broadcast(common), length, -length) if d in indexed else None
        for d, length in enumerate(shape)
    ]
    return draw.normal(shape), indices[: max(indexed) + 1]


def _or_all(indices: list[torch.Tensor | None]) -> list[torch.Tensor | slice]:
    return [slice(None) if index is None else index for index in indices]


@samples(aten.index_put)
def _index_put(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, indices = _index(draw, op)
    given = [index for index in indices if index is not None]
    if given[0].numel() > 1 and draw.flag():  # what is written twice is only defined if it adds
        values = draw.normal(draw.broadcast(list(x[tuple(_or_all(indices))].shape)))
        return x, indices, values, True
    return x, indices, draw.normal(()), False


@samples(aten.index_add)
def _index_add(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    source = list(shape)
    source[dim] = draw.length()
    return draw.normal(shape), dim, draw.integers([source[dim]], shape[dim]), draw.normal(source)


@samples(aten.gather)
def _gather(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    index_shape = [draw.count(1, n) if draw.count(0, 3) == 0 else n for n in shape]
    index_shape[dim] = draw.length()
    return draw.normal(shape), dim, draw.integers(index_shape, shape[dim])


def _scatter_arguments(draw: Draw) -> tuple[torch.Tensor, int, torch.Tensor]:
    """x, dim, and an index without repetition."""
    shape = draw.shape(1)
    dim = draw.dim(shape)
    index_shape = [draw.count(1, n) if draw.count(0, 3) == 0 else n for n in shape]
    line = torch.tensor(draw.data.draw(st.permutations(range(shape[dim]))))[: index_shape[dim]]
    view = [-1 if d == dim % len(shape) else 1 for d in range(len(shape))]
    index = line.view(view).expand(index_shape).contiguous()
    return draw.normal(shape), dim, index


@samples(aten.scatter.src)
def _scatter(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dim, index = _scatter_arguments(draw)
    return x, dim, index, draw.normal(index.shape)


@samples(aten.scatter.value)
def _scatter_number(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dim, index = _scatter_arguments(draw)
    return x, dim, index, draw.pick([0, 1.5])


@samples(aten.scatter_add)
def _scatter_add(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dim, index = _scatter_arguments(draw)
    return x, dim, index * 0 + draw.integers(index.shape, x.shape[dim]), draw.normal(index.shape)


@samples(aten.select_scatter)
def _select_scatter(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.count(0, len(shape) - 1)
    source = shape[:dim] + shape[dim + 1 :]
    return draw.normal(shape), draw.normal(source), dim, draw.count(-shape[dim], shape[dim] - 1)


@samples(aten.slice_scatter)
def _slice_scatter(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.count(0, len(shape) - 1)
    source = list(shape)
    source[dim] = draw.count(1, shape[dim])
    return draw.normal(shape), draw.normal(source), dim, 0, source[dim]


@samples(aten.one_hot)
def _one_hot(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.integers(draw.shape(0, 3), 4), 4


@samples(aten.embedding)
def _embedding(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rows, width = draw.length(), draw.length()
    return draw.normal([rows, width]), draw.integers(draw.shape(0, 3), rows)


@samples(
    aten.sum, aten.mean, aten.max, aten.min, aten.prod, aten.var, aten.std, aten.any, aten.all,
    aten.count_nonzero,
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


@samples(aten.var.dim, aten.std.dim)
def _var(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return x, dims, draw.flag(), keepdim


@samples(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def _var_correction(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dims, keepdim = _reduced(draw)
    return (
        x,
        draw.pick([dims[:1], dims, None]),
        {"correction": draw.pick([0, 1]), "keepdim": keepdim},
    )


@samples(aten.max.dim, aten.min.dim, aten.any.dim, aten.all.dim, aten.prod.dim_int)
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
    aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cumsum,
)  # fmt: skip
def _along(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.dim(shape)


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
