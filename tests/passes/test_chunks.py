"""Chunks: balanced runs of instances, values relayed past chunks, and gradients summed back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from msc.ir.errors import PlanError
from msc.ir.structure import Instance, Source
from msc.passes.chunks import balance, crossing
from msc.passes.compilation import Compilation
from tests.passes.graphs import (
    ATEN,
    Forward,
    assert_parity,
    assert_text,
    compilation,
    layers,
    through,
)

COSTS = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8)


def largest(costs: list[float], runs: list[list[int]]) -> float:
    return max(sum(costs[i] for i in run) for run in runs)


@given(COSTS.flatmap(lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))))
def test_no_split_has_a_smaller_largest_run(case: tuple[list[float], int]) -> None:
    costs, count = case
    runs = balance(costs, count)
    assert [i for run in runs for i in run] == list(range(len(costs)))
    assert len(runs) == count
    assert all(runs)
    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    borders = [(0, *cut, len(costs)) for cut in cuts]
    best = min(
        largest(costs, [list(range(a, b)) for a, b in itertools.pairwise(border)])
        for border in borders
    )
    assert largest(costs, runs) == best


def test_equal_layers_are_split_evenly() -> None:
    assert balance([1.0] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert balance([1.0] * 5, 2) == [[0, 1], [2, 3, 4]]  # the earlier one has less


def test_more_chunks_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        balance([1.0, 1.0], 3)
    assert str(error.value) == "2 blocks cannot fill 3 pipeline chunks."


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        through("build-chunks", compilation(layers(2), "pp=4"))
    assert str(error.value) == (
        "The mesh has 4 pipeline stages (pp=4), but the model has only 2 layers to put on them "
        "(layers.0, layers.1). Use pp=2 or less."
    )


def test_values_cross_every_chunk_up_to_their_last_reader() -> None:
    def read(*keys: tuple[int, int]) -> tuple[Source, ...]:
        return tuple(Source("block", "", *key) for key in keys)

    sources = [read(), read((0, 0)), read((1, 0)), read((2, 0), (0, 1))]
    instances = [Instance(i, f"block{i}", "", found) for i, found in enumerate(sources)]
    each = {i: i for i in range(4)}
    assert crossing(instances, each, 4) == [
        [],
        [(0, 0), (0, 1)],
        [(0, 1), (1, 0)],
        [(0, 1), (2, 0)],
    ]
    assert crossing(instances, {0: 0, 1: 0, 2: 1, 3: 1}, 2) == [[], [(0, 1), (1, 0)]]


def skipping() -> fx.GraphModule:
    """Three layers; the last one reads the results of both before it."""
    build = Forward()
    weights = [build.parameter(f"layers.{i}.weight", 8, 8) for i in range(3)]
    first = build.linear(build.input("x", 4, 8), weights[0], "layers.0")
    second = build.linear(first, weights[1], "layers.1")
    third = build.linear(second, weights[2], "layers.2")
    product = build.call(ATEN.mul.Tensor, third, first, path="layers.2")
    return build.done(build.call(ATEN.sum.default, product, path="layers.2"))


def chunks(gm: fx.GraphModule, mesh: str) -> Compilation:
    return through("build-chunks", compilation(gm, mesh))


def test_a_value_is_relayed_and_its_gradients_are_summed_on_the_way_back() -> None:
    unit = chunks(skipping(), "pp=3")
    assert_text(
        unit.graphs["chunk1.forward"],
        """
%layers_1_weight: f64[8,8] = parameter "layers.1.weight"
%received_0_0: f64[4,8] = value "received_0_0"  # layers.0
%block1_forward: (f64[4,8]) = call block1_forward(%layers_1_weight, %received_0_0)  # layers.1
%getitem: f64[4,8] = %block1_forward[0]  # layers.1
return ((%received_0_0, %getitem), None, (%received_0_0,))
""",
    )
    assert_text(
        unit.graphs["chunk1.backward"],
        """
%layers_1_weight: f64[8,8] = parameter "layers.1.weight"
%saved_0: f64[4,8] = saved "received_0_0"
%gradient_0_0: f64[4,8] = gradient "gradient_0_0"
%gradient_1_0: f64[4,8] = gradient "gradient_1_0"
%block1_backward: (f64[8,8], f64[4,8]) = call block1_backward(%layers_1_weight, %saved_0,\
 %gradient_1_0)  # layers.1
%getitem: f64[8,8] = %block1_backward[0]  # layers.1
%getitem_1: f64[4,8] = %block1_backward[1]  # layers.1
%add_tensor: f64[4,8] = aten.add.Tensor(%gradient_0_0, %getitem_1)
return ((%add_tensor,), (%getitem,))
""",
    )
    assert_parity(skipping(), "pp=3")
    assert_parity(skipping(), "pp=3", 4)


def test_what_a_chunk_reads_and_yields() -> None:
    first, middle, last = chunks(skipping(), "pp=3").variants[0].chunks
    assert (first.received, first.sent, first.has_loss) == ([], [(0, 0)], False)
    assert (middle.received, middle.sent) == ([(0, 0)], [(0, 0), (1, 0)])
    assert (last.received, last.sent, last.has_loss) == ([(0, 0), (1, 0)], [], True)
    assert last.sent_gradients == middle.received_gradients == [(0, 0), (1, 0)]
    assert middle.sent_gradients == first.received_gradients == [(0, 0)]
    assert first.sent_gradients == []
    assert [chunk.parameter_gradients for chunk in (first, middle, last)] == [
        [f"layers.{i}.weight"] for i in range(3)
    ]
    assert (first.others, middle.others) == ([("input", "x")], [])


def test_instances_of_a_block_share_its_graph() -> None:
    unit = chunks(layers(4, tied=True), "")
    (chunk,) = unit.variants[0].chunks
    calls = [n for n in chunk.forward.graph.nodes if n.op == "call_module"]
    assert [node.target for node in calls] == [
        "prelude",
        "block0_forward",
        *["block1_forward"] * 4,
        "block2_forward",
    ]
    assert chunk.backward is not None
    back = [n.target for n in chunk.backward.graph.nodes if n.op == "call_module"]
    assert back == ["block2_backward", *["block1_backward"] * 4, "block0_backward"]


def test_a_parameter_read_twice_in_a_chunk_has_one_gradient() -> None:
    unit = assert_parity(layers(2, tied=True), "")
    (chunk,) = unit.variants[0].chunks
    assert chunk.parameter_gradients.count("head.weight") == 1


def test_the_prelude_is_cut_to_what_a_chunk_reads() -> None:
    build = Forward()
    weights = [build.parameter(f"layers.{i}.weight", 8, 8) for i in range(2)]
    x, mask = build.input("x", 4, 8), build.input("mask", 4, 8)
    scale = build.call(ATEN.sin.default, mask)
    y = build.linear(x, weights[0], "layers.0")
    y = build.call(ATEN.mul.Tensor, build.linear(y, weights[1], "layers.1"), scale, path="layers.1")
    gm = build.done(build.call(ATEN.sum.default, y, path="layers.1"))
    first, last = chunks(gm, "pp=2").variants[0].chunks
    assert (first.others, last.others) == ([("input", "x")], [("input", "mask")])


def test_stages_of_parameters() -> None:
    unit = chunks(layers(2, tied=True), "pp=2")
    assert unit.stages_of["head.weight"] == [0, 1]
    assert unit.stages_of["layers.0.up.weight"] == [0]
    assert unit.stages_of["layers.1.up.weight"] == [1]
