"""Sample calls of ops that pick, place or pad elements."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import ops

from msc.ir.torch_private import OpOverload
from msc.testing.samples.draw import Draw, samples

aten = ops.aten


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


@samples(aten.index_copy)
def _index_copy(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    places = draw.data.draw(st.permutations(range(shape[dim])))[: draw.count(1, shape[dim])]
    source = list(shape)
    source[dim] = len(places)
    return draw.normal(shape), dim, torch.tensor(places), draw.normal(source)


@samples(aten.index_fill.int_Scalar)
def _index_fill(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    return draw.normal(shape), dim, draw.integers([draw.length()], shape[dim]), draw.pick([0, 1.5])


@samples(aten.take_along_dim)
def _take_along(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    index_shape = list(shape)
    index_shape[dim] = draw.length()
    return draw.normal(shape), draw.integers(index_shape, shape[dim]), dim


@samples(aten.scatter_reduce.two)
def _scatter_reduce(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x, dim, index = _scatter_arguments(draw)
    return x, dim, index, draw.normal(index.shape), draw.pick(["sum", "amax", "amin", "mean"])


@samples(aten.bucketize.Tensor)
def _bucketize(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), draw.normal([draw.length()]).sort().values


@samples(aten.searchsorted.Tensor)
def _search(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal([draw.length()]).sort().values, draw.normal(draw.shape())


@samples(aten.isin.Tensor_Tensor)
def _is_in(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.integers(draw.shape(), 9), draw.integers(draw.shape(0, 2), 9)
