"""Factors and placements correspond; strategies are legal."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.placement import REPLICATED, VARYING, Segments, Shard, shard_of, unshard
from msc.passes.sharding.rule import (
    Dims,
    Rule,
    factor_of,
    factors,
    placement_of,
    shard_factor,
    strategies,
)

lengths = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def products(draw: st.DrawFn) -> Dims:
    """Dims of one run each, with up to three factors."""
    count = 0
    dims = []
    for _ in range(draw(st.integers(1, 3))):
        run = []
        for _ in range(draw(st.integers(0, 3))):
            run.append((f"f{count}", draw(lengths)))
            count += 1
        dims.append((tuple(run),))
    return tuple(dims)


@st.composite
def runs(draw: st.DrawFn) -> Dims:
    """One dim of several runs that share a factor with different lengths."""
    inner = draw(lengths)
    several = draw(st.lists(st.sampled_from([2, 4, 6, 12]), min_size=2, max_size=4))
    return (tuple((("c", length), ("i", inner)) for length in several),)


@given(dims=st.one_of(products(), runs()), data=st.data())
def test_factor_of_is_the_inverse_of_placement_of(dims: Dims, data: st.DataObject) -> None:
    for name in factors(Rule((dims,), ())):
        own = [length for dim in dims for run in dim for f, length in run if f == name]
        segments: Segments = data.draw(st.sampled_from([1, 1, 2, 3]))
        if data.draw(st.booleans()) and own[0] > 4:
            segments = (2, own[0] - 2)
        if not all(Shard(0, segments).divides(length, 2) for length in own):
            continue
        placement = placement_of(dims, name, segments)
        if placement is None:
            continue
        found = factor_of(dims, placement)
        assert found is not None
        assert placement_of(dims, *found) == placement


@given(dims=products(), data=st.data())
def test_a_factor_is_sharded_where_its_axis_would_be(dims: Dims, data: st.DataObject) -> None:
    """Sharding a factor of a product is sharding its own axis of the unflattened tensor."""
    whole_shape = [length for ((*run,),) in dims for _, length in run]
    names = [name for ((*run,),) in dims for name, _ in run]
    flat = [torch.Size(length for _, length in run).numel() for (run,) in dims]
    apart = torch.arange(torch.Size(whole_shape).numel()).reshape(whole_shape)
    for axis, name in enumerate(names):
        if whole_shape[axis] % 2:
            continue
        placement = placement_of(dims, name)
        assert placement is not None
        local = shard_of(apart.reshape(flat), placement, 2, 1)
        expected = apart.chunk(2, axis)[1]
        assert torch.equal(local.reshape(expected.shape), expected)


@given(dims=st.one_of(products(), runs()))
def test_unshard_is_the_inverse_of_shard_of(dims: Dims) -> None:
    shape = [sum(torch.Size(n for _, n in run).numel() for run in dim) for dim in dims]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for name in factors(Rule((dims,), ())):
        placement = placement_of(dims, name)
        if placement is not None and placement.divides(shape[placement.dim], 2):
            parts = [shard_of(whole, placement, 2, rank) for rank in range(2)]
            assert torch.equal(unshard(parts, placement), whole)


def test_a_placement_that_no_factor_gives_is_none() -> None:
    dims: Dims = (((("a", 4), ("b", 6)),),)
    assert factor_of(dims, Shard(0)) == ("a", 1)
    assert factor_of(dims, Shard(0, 4)) == ("b", 1)
    assert factor_of(dims, Shard(0, 8)) == ("b", 2)
    assert factor_of(dims, Shard(0, 3)) is None
    assert factor_of(dims, Shard(0, (10, 14))) is None
    assert factor_of(dims, Shard(0, (2, 4) * 4)) == ("b", (2, 4))
    assert factor_of(dims, Shard(1)) is None


def test_segments_within_the_runs_of_a_fused_dim() -> None:
    dims: Dims = (((("c", 8),), (("c", 4),)),)
    assert factor_of(dims, Shard(0, (8, 4))) == ("c", 1)
    assert factor_of(dims, Shard(0, (4, 4, 2, 2))) == ("c", 2)
    assert factor_of(dims, Shard(0)) is None
    assert factor_of(dims, Shard(0, (4, 8))) is None


def test_without_a_rule_only_replication_is_legal() -> None:
    found = strategies(None, 2, 1, 2)
    assert [s.operands for s in found] == [(REPLICATED,) * 2, (VARYING,) * 2]
    assert [s.results for s in found] == [(REPLICATED,), (VARYING,)]


def test_illegal_shardings_have_no_strategy() -> None:
    x = (((("m", 4),),), ((("k", 6),),))
    rule = Rule((x,), (x[:1],), contracted={"k": "sum"})
    assert shard_factor(rule, "k", 1, 2) is not None
    assert shard_factor(rule, "k", 1, 4) is None  # 6 columns do not split over 4 ranks
    assert shard_factor(rule, "k", 2, 3) is not None
    assert shard_factor(rule, "m", (2, 1), 2) is None
    assert shard_factor(Rule((x,), (x[:1],)), "k", 1, 2) is None  # nothing says what it leaves
    whole = Rule((x,), (x,), whole=frozenset({"k"}))
    assert shard_factor(whole, "k", 1, 2) is None
    contiguous = Rule((x,), (x,), contiguous=frozenset({"k"}))
    assert shard_factor(contiguous, "k", 1, 3) is not None
    assert shard_factor(contiguous, "k", 2, 3) is None


def test_candidates_add_segments() -> None:
    x = (((("m", 12),),),)
    rule = Rule((x,), (x,))
    found = strategies(rule, 1, 1, 2, [("m", 3), ("m", (8, 4)), ("m", (7, 5)), ("other", 1)])
    assert [str(s) for s in found[2:]] == ["m: S0 -> S0", "m: S0/3 -> S0/3", "m: S0/8+4 -> S0/8+4"]
