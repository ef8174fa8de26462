"""What views and the like do to the global indices that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracle.values import Value


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims of `old` and `new` with equal numbers of elements, in order."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(left), j + len(right)
        while math.prod(old[d] for d in left) != math.prod(new[d] for d in right):
            if math.prod(old[d] for d in left) < math.prod(new[d] for d in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        found.append((left, right))
    return found


def view(value: Value, shape: Sequence[int]) -> Value | None:
    """The value in another global shape; None if the ranks' parts do not allow it in place."""
    if value.dim is None:
        return value.map(lambda part: part.reshape(shape), partial=value.partial)
    old = value.shape
    left, right = next(pair for pair in groups(old, shape) if value.dim in pair[0])
    long = [dim for dim in right if shape[dim] > 1] or right
    before = math.prod(old[dim] for dim in left if dim < value.dim)
    after = math.prod(old[dim] for dim in left if dim > value.dim)
    if len(long) == 1:
        new = [_merge(index, before, old[value.dim], after) for index in value.indices]
    elif before == after == 1:
        split = [
            _split(index, math.prod(shape[dim] for dim in long[1:])) for index in value.indices
        ]
        if any(index is None for index in split):
            return None
        new = [index for index in split if index is not None]
    else:
        return None
    parts = []
    for part, index in zip(value.parts, new, strict=True):
        local = list(shape)
        local[long[0]] = len(index)
        parts.append(part.reshape(local))
    return Value(tuple(parts), long[0], tuple(new))


def _merge(index: Tensor, before: int, length: int, after: int) -> Tensor:
    outer = torch.arange(before)[:, None, None] * length * after
    return (outer + index[None, :, None] * after + torch.arange(after)).flatten()


def _split(index: Tensor, inner: int) -> Tensor | None:
    """Indices of the outer part of a dim, if the rank has all of the inner part of each."""
    outer = index[::inner] // inner
    return outer if torch.equal(_merge(outer, 1, 1, inner), index) else None


def window(value: Value, dim: int, start: int, stop: int) -> Value:
    """Rows `start` to `stop` of a dim that may be sharded: each rank keeps those that it has."""
    dim %= len(value.shape)
    if value.dim != dim:
        return value.map(
            lambda part: part.narrow(dim, start, stop - start),
            dim=value.dim,
            indices=value.indices,
            partial=value.partial,
        )
    parts, indices = [], []
    for part, index in zip(value.parts, value.indices, strict=True):
        here = ((index >= start) & (index < stop)).nonzero().flatten()
        parts.append(part.index_select(dim, here))
        indices.append(index[here] - start)
    return Value(tuple(parts), dim, tuple(indices))


def join(values: Sequence[Value], dim: int) -> Value | None:
    """The concatenation along a dim; None if the values are placed in different ways."""
    dim %= len(values[0].shape)
    first = values[0]
    ranks = first.ranks
    if all(value.dim == dim for value in values):
        starts = [sum(value.shape[dim] for value in values[:i]) for i in range(len(values))]
        indices = [
            torch.cat([v.indices[r] + s for v, s in zip(values, starts, strict=True)])
            for r in ranks
        ]
        parts = [torch.cat([value.parts[r] for value in values], dim) for r in ranks]
        return Value(tuple(parts), dim, tuple(indices))
    alike = all(
        (v.dim, v.partial) == (first.dim, first.partial)
        and (first.dim is None or first.same_shard(v))
        for v in values
    )
    if not alike or first.dim == dim:
        return None
    parts = [torch.cat([value.parts[r] for value in values], dim) for r in ranks]
    return Value(tuple(parts), first.dim, first.indices, first.partial)
