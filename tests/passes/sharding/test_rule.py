"""Factors and placements correspond; strategies are legal."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.placement import REPLICATED, VARYING, Segments, Shard, Split, shard_of, unshard
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
        split = Split(segments, data.draw(st.sampled_from([0, 0, 1, 2])))
        if not all(split.divides(length, 2) for length in own):
            continue
        if any(run < 2 * split.unit for length in own for run in split.run_lengths(length)):
            continue
        placement = placement_of(dims, name, split)
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
    assert factor_of(dims, Shard(0)) == ("a", Split(1))
    assert factor_of(dims, Shard(0, 4)) == ("b", Split(1))
    assert factor_of(dims, Shard(0, 8)) == ("b", Split(2))
    assert factor_of(dims, Shard(0, 3)) is None
    assert factor_of(dims, Shard(0, (10, 14))) is None
    assert factor_of(dims, Shard(0, (2, 4) * 4)) == ("b", Split((2, 4)))
    assert factor_of(dims, Shard(1)) is None


def test_segments_within_the_runs_of_a_fused_dim() -> None:
    dims: Dims = (((("c", 8),), (("c", 4),)),)
    assert factor_of(dims, Shard(0, (8, 4))) == ("c", Split(1))
    assert factor_of(dims, Shard(0, (4, 4, 2, 2))) == ("c", Split(2))
    assert factor_of(dims, Shard(0)) is None
    assert factor_of(dims, Shard(0, (4, 8))) is None


def test_without_a_rule_only_replication_is_legal() -> None:
    found = strategies(None, 2, 1, 2)
    assert [s.operands for s in found] == [(REPLICATED,) * 2, (VARYING,) * 2]
    assert [s.results for s in found] == [(REPLICATED,), (VARYING,)]


def test_illegal_shardings_have_no_strategy() -> None:
    x = (((("m", 4),),), ((("k", 6),),))
    rule = Rule((x,), (x[:1],), contracted={"k": "sum"})
    assert shard_factor(rule, "k", Split(1), 2) is not None
    assert shard_factor(rule, "k", Split(1), 4) is None  # 6 columns do not split over 4 ranks
    assert shard_factor(rule, "k", Split(2), 3) is not None
    assert shard_factor(rule, "m", Split((2, 1)), 2) is None
    assert (
        shard_factor(Rule((x,), (x[:1],)), "k", Split(1), 2) is None
    )  # nothing says what it leaves
    whole = Rule((x,), (x,), whole=frozenset({"k"}))
    assert shard_factor(whole, "k", Split(1), 2) is None
    contiguous = Rule((x,), (x,), contiguous=frozenset({"k"}))
    assert shard_factor(contiguous, "k", Split(1), 3) is not None
    assert shard_factor(contiguous, "k", Split(2), 3) is None


def test_candidates_add_segments() -> None:
    x = (((("m", 12),),),)
    rule = Rule((x,), (x,))
    wanted: list[tuple[str, Segments]] = [("m", 3), ("m", (8, 4)), ("m", (7, 5)), ("other", 1)]
    found = strategies(rule, 1, 1, 2, [(name, Split(segments)) for name, segments in wanted])
    assert [str(s) for s in found[2:]] == ["m: S0 -> S0", "m: S0/3 -> S0/3", "m: S0/8+4 -> S0/8+4"]


def test_an_uneven_factor_is_split_in_units() -> None:
    """Three heads of four over two ranks: two and one, in the heads and in the flat dim."""
    heads = (((("h", 3),),), ((("d", 4),),))
    flat = (((("h", 3), ("d", 4)),),)
    view = Rule((flat,), (heads,), whole=frozenset({"d"}))
    assert shard_factor(view, "h", Split(), 2) is None
    found = shard_factor(view, "h", Split(), 2, uneven=True)
    assert found is not None
    assert str(found) == "h: S0@4 -> S0@1"
    assert found.share == 2 / 3
    named = factor_of(flat, Shard(0, 1, 4))
    assert named == ("h", Split(1, 1))
    assert shard_factor(view, *named, 2, uneven=True) == found
    columns = (((("n", 12),),),)
    assert factor_of(columns, Shard(0, 1, 4)) == ("n", Split(1, 4))
    plain = Rule((columns,), (columns,))
    assert str(shard_factor(plain, "n", Split(1, 4), 2, uneven=True)) == "n: S0@4 -> S0@4"
    assert str(shard_factor(plain, "n", Split(1, 4), 3, uneven=True)) == "n: S0 -> S0"


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.integers(1, 3),
    st.booleans(),
)
def test_unequal_parts_make_the_whole(size: int, counts: list[int], unit: int, equal: bool) -> None:
    runs = [count * unit for count in (counts[:1] * len(counts) if equal else counts)]
    placement = Shard(1, len(runs) if equal else tuple(runs), unit)
    whole = torch.arange(2 * sum(runs)).reshape(2, -1)
    parts = [shard_of(whole, placement, size, rank) for rank in range(size)]
    assert torch.equal(unshard(parts, placement), whole)
    lengths = [part.shape[1] for part in parts]
    assert sorted(lengths, reverse=True) == lengths
    assert lengths[0] - lengths[-1] <= unit * len(runs)
