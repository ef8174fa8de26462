"""Buckets of shards: rows are the shards, and the values come back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.data_shard import DataShard
from msc.runtime.shards import flatten_shards, unflatten_shards

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(st.lists(SHAPES, min_size=1, max_size=3), st.integers(2, 4), st.booleans(), st.data())
def test_rows_are_shards(
    shapes: list[tuple[int, ...]], parts: int, convert: bool, data: st.DataObject
) -> None:
    values = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    dims = [data.draw(st.integers(0, len(shape) - 1)) for shape in shapes]
    dtype = torch.float32 if convert else None
    bucket = flatten_shards(values, dims, parts, dtype)
    assert bucket.dtype == (dtype or torch.float64)
    pairs = [(DataShard(dim, parts), v) for dim, v in zip(dims, values, strict=True)]
    rows = [torch.cat([s.shard(v, i).flatten() for s, v in pairs]) for i in range(parts)]
    assert torch.equal(bucket, torch.cat(rows).to(bucket.dtype))
    found = unflatten_shards(bucket, shapes, dims, parts)
    for value, again in zip(values, found, strict=True):
        assert again.is_contiguous()
        assert torch.equal(value.to(bucket.dtype), again)


@given(SHAPES, st.integers(1, 6))
def test_the_dim_with_the_least_padding(shape: tuple[int, ...], parts: int) -> None:
    shard = DataShard.choose(shape, parts)
    if parts == 1:
        assert shard is None
        return
    assert shard is not None
    sizes = [torch.Size(DataShard(dim, parts).shape(shape)).numel() for dim in range(len(shape))]
    assert sizes[shard.dim] == min(sizes)
    whole = torch.rand(shape)
    shards = [shard.shard(whole, index) for index in range(parts)]
    assert {tuple(part.shape) for part in shards} == {shard.shape(shape)}
    assert torch.equal(shard.whole(shards, shape[shard.dim]), whole)
    assert torch.stack(shards).sum().isclose(whole.sum())


def test_a_number_is_not_split() -> None:
    assert DataShard.choose((), 4) is None
