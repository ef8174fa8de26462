"""Sample calls of ops that rearrange dims, take them apart and join them."""

from __future__ import annotations

from typing import Any

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


@samples(aten.tile)
def _tile(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(0, 3)
    return draw.normal(shape), [draw.pick([1, 2, 3]) for _ in range(draw.count(0, len(shape) + 1))]


@samples(aten.diagonal)
def _diagonal(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(2)
    first, second = draw.dims(shape, low=2)[:2]
    return draw.normal(shape), draw.count(-1, 1), first, second


@samples(aten.diag_embed)
def _diag_embed(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape(1, 3)), draw.count(-1, 1)


@samples(aten.ravel, aten.atleast_1d, aten.atleast_2d, aten.atleast_3d)
def _ravel(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape()),)


@samples(aten.repeat_interleave.self_int)
def _repeat_interleave(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    return draw.normal(shape), draw.pick([1, 2, 3, 6]), draw.dim(shape)


@samples(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.pick([1, 2, 3, 4, 6]), draw.dim(shape)


@samples(aten.split_with_sizes, aten.split.sizes, aten.unsafe_split_with_sizes)
def _split_sizes(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    dim = draw.dim(shape)
    sizes = [draw.pick([0, 2, 2, 4, 6]) for _ in range(draw.count(1, 3))]
    shape[dim] = sum(sizes)
    return draw.normal(shape), sizes, dim


@samples(aten.chunk, aten.unsafe_chunk, aten.tensor_split.sections)
def _chunk(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    dim = draw.dim(shape)
    shape[dim] = draw.pick([1, 2, 6, 10, 12, 16, 18])
    return draw.normal(shape), draw.count(1, 5), dim


@samples(aten.tensor_split.indices)
def _split_at(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    dim = draw.dim(shape)
    shape[dim] = 12
    return draw.normal(shape), draw.pick([[4], [4, 8], [2, 8], [6, 6]]), dim


FIXED_DIM = {"v": 0, "h": 1, "d": 2}
"""The dim of vsplit, hsplit and dsplit, of vstack, hstack and dstack."""


@samples(aten.vsplit.int, aten.hsplit.int, aten.dsplit.int)
def _split_fixed(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(3, 4)
    shape[FIXED_DIM[str(op)[len("aten.")]]] = 12
    return draw.normal(shape), draw.pick([1, 2, 3, 6])


@samples(aten.vsplit.array, aten.hsplit.array, aten.dsplit.array)
def _split_fixed_at(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(3, 4)
    shape[FIXED_DIM[str(op)[len("aten.")]]] = 12
    return draw.normal(shape), draw.pick([[4], [4, 8], [2, 8]])


@samples(aten.vstack, aten.row_stack, aten.hstack, aten.column_stack, aten.dstack)
def _join_fixed(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    dims = {"row": 0, "col": 1} | {f"{name}st": dim for name, dim in FIXED_DIM.items()}
    dim = dims[str(op)[len("aten.") :][:3]]
    shape = draw.shape(3, 4)
    parts = []
    for _ in range(draw.count(1, 3)):
        shape[dim] = draw.pick([2, 2, 4, 6])
        parts.append(draw.normal(shape))
    return (parts,)


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
