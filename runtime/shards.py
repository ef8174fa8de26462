"""Values and the buckets in which their shards travel over dp (see `msc.ir.data_shard`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from msc.ir.data_shard import DataShard


def flatten_shards(
    values: Sequence[Tensor],
    dims: Sequence[int],
    parts: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A 1-D tensor of `parts` rows, of which row i holds shard i of every value, in order.

    Value j is split along `dims[j]`; what has to be padded is padded with zeros. The result is a
    view where there is one value that needs no copy.
    """
    shards = [DataShard(dim, parts) for dim in dims]
    dtype = dtype or values[0].dtype
    if len(values) == 1 and dims[0] == 0 and values[0].shape[0] % parts == 0:
        return values[0].to(dtype).reshape(-1)
    sizes = [math.prod(s.shape(v.shape)) for s, v in zip(shards, values, strict=True)]
    bucket = values[0].new_empty((parts, sum(sizes)), dtype=dtype)
    for value, shard, row in zip(values, shards, torch.split(bucket, sizes, dim=1), strict=True):
        _copy_in(value, shard, row.view(parts, *shard.shape(value.shape)))
    return bucket.view(-1)


def unflatten_shards(
    bucket: Tensor, shapes: Sequence[tuple[int, ...]], dims: Sequence[int], parts: int
) -> tuple[Tensor, ...]:
    """The contiguous tensors of these shapes, from the rows that `flatten_shards` makes of them."""
    shards = [DataShard(dim, parts) for dim in dims]
    parts_of = [shard.shape(shape) for shard, shape in zip(shards, shapes, strict=True)]
    if len(shapes) == 1 and dims[0] == 0:
        return (bucket.view(-1, *parts_of[0][1:])[: shapes[0][0]],)
    rows = torch.split(bucket.view(parts, -1), [math.prod(p) for p in parts_of], dim=1)
    found = []
    for row, part, shape, dim in zip(rows, parts_of, shapes, dims, strict=True):
        runs = row.view(parts, *part).movedim(0, dim).flatten(dim, dim + 1)
        found.append(runs.narrow(dim, 0, shape[dim]).contiguous())
    return tuple(found)


def _copy_in(value: Tensor, shard: DataShard, rows: Tensor) -> None:
    """Write the shards of a value to `rows`, of which each has the shape of a shard."""
    dim, length = shard.dim, value.shape[shard.dim]
    run = shard.run(length)
    whole, rest = divmod(length, run)
    if whole:
        runs = torch.unflatten(value.narrow(dim, 0, whole * run), dim, (whole, run))
        rows[:whole].copy_(runs.movedim(dim, 0))
    if rest:
        rows[whole].narrow(dim, 0, rest).copy_(value.narrow(dim, whole * run, rest))
        rows[whole].narrow(dim, rest, run - rest).zero_()
    rows[whole + bool(rest) :].zero_()
