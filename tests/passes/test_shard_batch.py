"""The batch over dp and micro-batches: prologue, demanded shards, blocks that differ, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.passes.compilation import Compilation
from msc.passes.sharding.batch import NotSeparableError
from tests.passes.graphs import (
    ATEN,
    Forward,
    assert_parity,
    assert_text,
    compilation,
    text,
    through,
)

SPLITS = [("dp=2", 1), ("", 2), ("dp=2", 2), ("dp=4", 1), ("", 4)]


def masked_mean(layers: int = 1) -> fx.GraphModule:
    """The mean over the labels that count."""
    build = Forward()
    weights = [build.parameter(f"layers.{i}.weight", 8, 8) for i in range(layers)]
    y, labels = build.input("x", 4, 8), build.input("labels", 4, 8, dtype=torch.int64)
    mask = build.call(ATEN.ne.Scalar, labels, 1)
    for i, weight in enumerate(weights):
        y = build.linear(y, weight, f"layers.{i}")
        y = build.call(ATEN.where.ScalarOther, mask, y, 0.0, path=f"layers.{i}")
    total = build.call(ATEN.sum.default, y, path="loss")
    count = build.call(ATEN.sum.default, mask, path="loss")
    return build.done(build.call(ATEN.div.Tensor, total, count, path="loss"))


def reduced(reduction: str) -> fx.GraphModule:
    build = Forward()
    y = build.linear(build.input("x", 4, 8), build.parameter("w", 8, 8), "layer")
    if reduction == "mean of means":
        y = build.call(ATEN.mean.dim, y, [-1])
        reduction = "mean"
    if reduction == "divided":
        total = build.call(ATEN.sum.default, build.call(ATEN.sin.default, y))
        return build.done(build.call(ATEN.div.Tensor, total, 32))
    y = build.call(ATEN.sin.default, y)
    return build.done(build.call(getattr(ATEN, reduction).default, y))


def sharded(gm: fx.GraphModule, mesh: str, micro_batches: int = 1) -> Compilation:
    return through("shard-batch", compilation(gm, mesh, micro_batches))


@given(
    st.sampled_from(["sum", "mean", "mean of means", "divided"]),
    st.sampled_from(SPLITS),
)
@settings(max_examples=10, deadline=None)
def test_sums_and_means_keep_their_numbers(reduction: str, split: tuple[str, int]) -> None:
    unit = assert_parity(reduced(reduction), *split)
    assert unit.prologue is None


@pytest.mark.parametrize("split", SPLITS)
def test_a_masked_mean_keeps_its_numbers(split: tuple[str, int]) -> None:
    unit = assert_parity(masked_mean(2), *split)
    assert (unit.prologue is not None) == (split[1] > 1)


def test_a_count_is_reduced_in_place_over_dp() -> None:
    unit = sharded(masked_mean(), "dp=2")
    assert_text(
        unit.graphs["block0"],
        """
%layers_0_weight: f64[8,8] = parameter "layers.0.weight"
%x: f64[4,8]{dp:S0} = input "x"
%ne_scalar: bool[4,8]{dp:S0} = prelude "ne_scalar"
%sum_default_1: i64[]{dp:P} = prelude "sum_default_1"  # loss
%linear_default: f64[4,8]{dp:S0} = msc.linear(%x, %layers_0_weight)  # layers.0
%where_scalar_other: f64[4,8]{dp:S0} = aten.where.ScalarOther(%ne_scalar, %linear_default, 0.0)\
  # layers.0
%sum_default: f64[]{dp:P} = aten.sum(%where_scalar_other)  # loss
%div_tensor: f64[]{dp:P} = aten.div.Tensor(%sum_default, %sum_default_1)  # loss
return (%div_tensor,)
""",
    )
    assert unit.prologue is None


def test_a_count_moves_to_the_prologue_over_time() -> None:
    unit = sharded(masked_mean(), "dp=2", 2)
    assert list(unit.graphs) == ["prelude", "block0", "prologue"]
    assert_text(
        unit.graphs["prelude"],
        """
%x: f64[4,8]{mb:S0,dp:S0} = input "x"
%labels: i64[4,8]{mb:S0,dp:S0} = input "labels"
%sum_default_1_whole: i64[] = step "sum_default_1"  # loss
%ne_scalar: bool[4,8]{mb:S0,dp:S0} = aten.ne.Scalar(%labels, 1)
return (%x, %ne_scalar, %sum_default_1_whole)
""",
    )
    assert_text(
        unit.graphs["prologue"],
        """
%labels: i64[4,8] = input "labels"
%ne_scalar: bool[4,8] = aten.ne.Scalar(%labels, 1)
%sum_default_1: i64[] = aten.sum(%ne_scalar)  # loss
return (%sum_default_1,)
""",
    )
    assert unit.prologue_names == ["sum_default_1"]
    through_shard = through("shard", compilation(masked_mean(), "dp=2", 2))
    assert_text(
        through_shard.graphs["prologue"],
        """
%labels: i64[2,8]{dp:S0/2} = input "labels"
%ne_scalar: bool[2,8]{dp:S0/2} = aten.ne.Scalar(%labels, 1)
%sum_default: i64[]{dp:P} = aten.sum(%ne_scalar)  # loss
%all_reduce_default: i64[] = msc.all_reduce(%sum_default, 'sum', 'dp', 2, 'all_reduce')  # loss
return (%all_reduce_default,)
""",
    )


def test_a_count_used_inside_the_prelude_moves_too() -> None:
    """The weights of the labels: each divided by the count, before any layer."""

    def graph() -> fx.GraphModule:
        build = Forward()
        w, x = build.parameter("w", 8, 8), build.input("x", 4, 8)
        positive = build.call(ATEN.mul.Tensor, x, x)
        share = build.call(ATEN.div.Tensor, positive, build.call(ATEN.sum.default, positive))
        y = build.call(ATEN.mul.Tensor, build.linear(x, w), share)
        return build.done(build.call(ATEN.sum.default, y))

    unit = assert_parity(graph(), "dp=2", 2)
    assert unit.prologue_names == ["sum_default"]
    # once per step and rank class, before the first forward
    calls = [n.target for n in unit.rank_graphs[0].graph.nodes if n.op == "call_module"]
    assert calls[0] == "prologue"
    assert calls.count("prologue") == 1


def by_position() -> fx.GraphModule:
    """A constant with one row per sample."""
    build = Forward()
    w, x = build.parameter("w", 8, 8), build.input("x", 4, 8)
    rows = build.call(ATEN.arange.default, 4, dtype=torch.float64)
    column = build.call(ATEN.unsqueeze.default, rows, 1)
    y = build.call(ATEN.mul.Tensor, build.linear(x, w), column)
    return build.done(build.call(ATEN.sum.default, y))


def test_a_constant_is_computed_in_parts_where_every_reader_slices_it() -> None:
    unit = through("shard", compilation(by_position(), "dp=2", 2))
    assert unit.structure.prelude_outputs == ["x", "unsqueeze_default@S0"]
    assert_text(
        unit.graphs["prelude"],
        """
%x: f64[1,8]{mb:S0,dp:S0} = input "x"
%coordinate_mb: i64[] = coordinate "mb"
%coordinate_dp: i64[] = coordinate "dp"
%arange_default: f64[4] = aten.arange(4, dtype=f64)
%shard_default: f64[2]{mb:S0} = msc.shard(%arange_default, 0, [2], 'mb', 2, %coordinate_mb, 'pad')
%shard_default_1: f64[1]{mb:S0,dp:S0} = msc.shard(%shard_default, 0, [1], 'dp', 2,\
 %coordinate_dp, 'pad')
%unsqueeze_default_1: f64[1,1]{mb:S0,dp:S0} = aten.unsqueeze(%shard_default_1, 1)
return (%x, %unsqueeze_default_1)
""",
    )
    assert_parity(by_position(), "dp=2", 2)


def used_whole_and_sliced() -> fx.GraphModule:
    build = Forward()
    w, x = build.parameter("w", 8, 8), build.input("x", 4, 8)
    rows = build.call(ATEN.arange.default, 4, dtype=torch.float64)
    column = build.call(ATEN.unsqueeze.default, rows, 1)
    y = build.call(ATEN.mul.Tensor, build.linear(x, w), column)
    tail = build.call(ATEN.slice.Tensor, w, 0, 0, 4)
    scale = build.call(ATEN.sum.default, build.call(ATEN.mul.Tensor, tail, column))
    loss = build.call(ATEN.mul.Tensor, build.call(ATEN.sum.default, y), scale)
    return build.done(loss)


def test_a_constant_stays_whole_where_one_reader_needs_all_of_it() -> None:
    unit = through("shard", compilation(used_whole_and_sliced(), "dp=2", 2))
    assert unit.structure.prelude_outputs == ["x", "unsqueeze_default"]
    local = text(unit.graphs["block0"])
    assert '%unsqueeze_default: f64[4,1] = prelude "unsqueeze_default"' in local
    assert "msc.shard(%unsqueeze_default, 0, [2], 'mb', 2, %coordinate_mb, 'pad')" in local
    assert_parity(used_whole_and_sliced(), "dp=2", 2)


def mixed(num_shared: int) -> fx.GraphModule:
    """Equal layers on a batch, then on an input that every rank reads whole."""
    build = Forward()
    count = 2 + num_shared
    weights = [build.parameter(f"layers.{i}.weight", 8, 8) for i in range(count)]
    first = build.parameter("first", 8, 8)
    x, z = build.input("x", 4, 8), build.input("z", 4, 8)
    x, z = build.linear(x, first, "first"), build.linear(z, first, "first")
    for i in range(2):
        x = build.linear(x, weights[i], f"layers.{i}")
    for i in range(2, count):
        z = build.linear(z, weights[i], f"layers.{i}")
    shared = build.call(ATEN.sum.dim_IntList, z, [0])
    return build.done(build.call(ATEN.sum.default, build.call(ATEN.mul.Tensor, x, shared)))


def test_equal_layers_on_a_batch_and_on_the_whole_are_two_blocks() -> None:
    unit = compilation(mixed(2), "dp=2", batch_dims={"z": None})
    through("shard-batch", unit)
    assert [instance.block for instance in unit.structure.instances] == [
        "block0",
        "block1",
        "block1",
        "block1_1",
        "block1_1",
        "block2",
    ]
    assert unit.structure.counts == {"block0": 1, "block1": 2, "block1_1": 2, "block2": 1}
    assert_text(
        unit.graphs["block1_1"],
        """
%layers_0_weight: f64[8,8] = parameter "layers.0.weight"
%linear_default: f64[4,8] = value "linear_default"  # first
%linear_default_2: f64[4,8] = msc.linear(%linear_default, %layers_0_weight)  # layers.0
return (%linear_default_2,)
""",
    )


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "pp=2,dp=2"])
def test_blocks_that_differ_over_the_batch_keep_their_numbers(mesh: str) -> None:
    assert_parity(mixed(1), mesh, batch_dims={"z": None})


def contrastive() -> fx.GraphModule:
    build = Forward()
    y = build.linear(build.input("x", 4, 8), build.parameter("w", 8, 8), "head")
    scores = build.call(ATEN.mm.default, y, build.call(ATEN.t.default, y), path="head.scores")
    return build.done(build.call(ATEN.sum.default, build.call(ATEN.sin.default, scores)))


def test_what_combines_samples_is_refused_over_time_and_named() -> None:
    for mesh in ("", "dp=2"):
        with pytest.raises(NotSeparableError) as error:
            sharded(contrastive(), mesh, 2)
        assert str(error.value) == "combines samples of the batch"
        assert error.value.node.meta["module_path"] == "head.scores"


def test_what_combines_samples_is_gathered_over_dp() -> None:
    unit = assert_parity(contrastive(), "dp=2")
    gathers = [
        n for n in unit.variants[0].local["block0"].gm.graph.nodes if "all_gather" in str(n.target)
    ]
    assert len(gathers) == 1  # both operands of the product come from one


def test_without_batch_axes_nothing_is_sharded() -> None:
    unit = sharded(masked_mean(), "tp=2")
    states = {str(state) for plan in unit.batch.values() for state in plan.states.values()}
    assert states == {"R~"}
    assert unit.log[-1].changes == 0
