"""Which strategies there are: plain ones from the rules, segments found at splits, ties, limits."""

from __future__ import annotations

import operator

from torch import fx

from msc.ir.placement import sharded
from msc.passes.sharding.axes import Axis
from msc.passes.sharding.candidates import Candidates, find_candidates
from tests.passes.graphs import ATEN, Forward, compilation, through
from tests.passes.sharding.placing import Problem


def candidates(gm: fx.GraphModule, size: int = 2) -> dict[str, list[str]]:
    """The strategies of every call, and the shards of every placeholder, by name."""
    found = Problem.of(through("shard-batch", compilation(gm)), size).candidates
    return named(found)


def named(found: Candidates) -> dict[str, list[str]]:
    return {
        node.name: [str(option) for option in options]
        for table in (found.strategies, found.placeholders)
        for node, options in table.items()
    }


def fused(sizes: list[int] | int, width: int) -> fx.GraphModule:
    """Three parts of a fused linear, multiplied where they have one shape."""
    build = Forward()
    w, x = build.parameter("w", width, 8), build.input("x", 4, 8)
    y = build.linear(x, w)
    op = ATEN.split.Tensor if isinstance(sizes, int) else ATEN.split_with_sizes.default
    parts = build.call(op, y, sizes, -1)
    sums = [build.call(ATEN.sum.default, build.call(operator.getitem, parts, i)) for i in range(3)]
    total = build.call(ATEN.add.Tensor, sums[0], sums[1])
    return build.done(build.call(ATEN.add.Tensor, total, sums[2]))


def test_a_fused_weight_is_split_by_segments() -> None:
    found = candidates(fused(8, 24))
    assert found["split_tensor"] == [
        "-: R -> R, R, R",
        "-: R~ -> R~, R~, R~",
        "-: P -> P, P, P",
        "d0: S0 -> S0, S0, S0",
        "rest: S1/3 -> S1, S1, S1",
    ]
    assert found["w"] == ["S1", "S0", "S0/3"]
    assert found["linear_default"][-1] == "n: R, S0/3 -> S1/3"


def test_grouped_heads_have_segments_of_unequal_lengths() -> None:
    found = candidates(fused([16, 4, 4], 24))
    assert found["w"] == ["S1", "S0", "S0/16+4+4"]
    assert "n: R, S0/16+4+4 -> S1/16+4+4" in found["linear_default"]


def test_what_does_not_divide_is_split_unevenly() -> None:
    """24 rows split over 3 ranks, but neither 8 columns nor runs of 8; runs of 4 are too short."""
    assert candidates(fused(8, 24), 3)["w"] == ["S1@1", "S0", "S0/3@1"]
    assert candidates(fused([16, 4, 4], 24), 8)["w"] == ["S1", "S0"]


def test_placements_cross_block_borders_and_ties() -> None:
    """A split in the second layer gives the first layer's weight its segments."""
    build = Forward()
    first, second = build.parameter("layers.0.w", 24, 8), build.parameter("layers.1.w", 8, 8)
    y = build.linear(build.input("x", 4, 8), first, "layers.0")
    parts = build.call(ATEN.split.Tensor, y, 8, -1, path="layers.1")
    left, right, _ = (build.call(operator.getitem, parts, i, path="layers.1") for i in range(3))
    product = build.call(ATEN.mul.Tensor, left, right, path="layers.1")
    y = build.linear(product, second, "layers.1")
    found = candidates(build.done(build.call(ATEN.sum.default, y, path="layers.1")))
    assert found["layers_0_w"] == ["S1", "S0", "S0/3"]
    assert "S1/3" in found["linear_default"]  # as the second block's input


def test_states_without_a_gradient_are_one() -> None:
    """An input has no gradient, so that replicated stands for both."""
    build = Forward()
    w, x = build.parameter("w", 8), build.input("x", 4, 8)
    masked = build.call(ATEN.mul.Tensor, w, x)
    found = candidates(build.done(build.call(ATEN.sum.default, masked)))
    assert found["mul_tensor"] == [
        "-: R, R -> R",
        "-: R~, R -> R~",
        "-: P, R -> P",
        "-: R~, P -> P",
        "e_0: S0, S1 -> S1",
        "e_1: R~, S0 -> S0",
    ]


def test_what_dp_left_of_the_batch_can_be_split_further() -> None:
    """Two rows per rank of dp: tp may take one each."""
    build = Forward()
    w, x = build.parameter("w", 8, 8), build.input("x", 8, 4, 8)
    y = build.call(ATEN.softmax.int, build.linear(x, w), -1)
    unit = through("shard-batch", compilation(build.done(build.call(ATEN.sum.default, y)), "dp=4"))
    plans = {name: unit.batch[name] for name in unit.structure.blocks}
    found = find_candidates(
        unit.structure,
        Axis("tp", 2),
        (Axis("dp", 4),),
        {name: {n: (s,) for n, s in plan.strategies.items()} for name, plan in plans.items()},
        {name: {v: (s,) for v, s in plan.states.items()} for name, plan in plans.items()},
    )
    (softmax,) = [n for n in found.strategies if "softmax" in n.name]
    assert plans["block0"].states[softmax, 0] == sharded(0)
    assert [str(s) for s in found.strategies[softmax] if s.factor] == [
        "d0: S0 -> S0",
        "d1: S1 -> S1",
    ]
