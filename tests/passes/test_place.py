"""Placing: what the pass hands on, what it leaves alone, and numbers under every placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from msc.ir.errors import PlanError
from msc.ir.optimizer import SGD, AdamW, Optimizer
from msc.ir.placement import Shard
from tests.passes.graphs import (
    ATEN,
    Forward,
    assert_parity,
    assert_text,
    compilation,
    layers,
    through,
)


def mlp() -> fx.GraphModule:
    build = Forward()
    up, down = build.parameter("up.weight", 16, 8), build.parameter("down.weight", 8, 16)
    y = build.call(ATEN.relu.default, build.linear(build.input("x", 5, 8), up, "up"), path="act")
    return build.done(build.call(ATEN.sum.default, build.linear(y, down, "down"), path="loss"))


def test_the_text_shows_what_is_sharded() -> None:
    unit = through("place", compilation(mlp(), "tp=2"))
    assert_text(
        unit.graphs["block0"],
        """
%up_weight: f64[16,8]{tp:S0} = parameter "up.weight"
%down_weight: f64[8,16]{tp:S1} = parameter "down.weight"
%x: f64[5,8] = input "x"
%linear_default: f64[5,16]{tp:S1} = msc.linear(%x, %up_weight)  # up
%relu_default: f64[5,16]{tp:S1} = aten.relu(%linear_default)  # act
%linear_default_1: f64[5,8]{tp:P} = msc.linear(%relu_default, %down_weight)  # down
%sum_default: f64[]{tp:P} = aten.sum(%linear_default_1)  # loss
return (%sum_default,)
""",
    )
    assert unit.log[-1].changes == 6  # the lines that say more than before


def test_nothing_is_placed_without_tp() -> None:
    unit = through("place", compilation(layers(), "pp=2,dp=2"))
    assert unit.placed is None
    assert unit.log[-1].changes == 0


def test_every_call_and_placeholder_is_placed() -> None:
    unit = through("place", compilation(layers(3), "dp=2,tp=2", 2))
    assert unit.placed is not None
    for gm in unit.structure.blocks.values():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                assert node in unit.placed.placeholders
            elif node.op == "call_function":
                assert node in unit.placed.strategies


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_weight_is_sharded_where_it_divides(size: int) -> None:
    unit = assert_parity(layers(2, tied=True), f"tp={size}")
    for name, states in unit.parameter_states.items():
        assert isinstance(states["tp"].value, Shard), name


def odd(rows: int, columns: int) -> fx.GraphModule:
    build = Forward()
    first, second = build.parameter("first", rows, columns), build.parameter("second", 5, rows)
    y = build.linear(build.input("x", 6, columns), first, "first")
    y = build.linear(build.call(ATEN.sin.default, y), second, "second")
    return build.done(build.call(ATEN.sum.default, build.call(ATEN.sin.default, y)))


@pytest.mark.parametrize(("rows", "columns"), [(6, 4), (7, 4), (7, 5), (4, 5)])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2"])
def test_dims_that_do_not_divide_keep_their_numbers(rows: int, columns: int, mesh: str) -> None:
    assert_parity(odd(rows, columns), mesh)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_numbers_are_kept(mesh: str, micro_batches: int) -> None:
    assert_parity(layers(3, tied=True), mesh, micro_batches)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [(None, 2), (SGD(), 2), (SGD(momentum=0.9), 3), (AdamW(), 4)],
)
def test_the_memory_bound_counts_what_the_optimizer_keeps(
    optimizer: Optimizer | None, copies: int
) -> None:
    """Half of the parameters on each of two ranks, with gradients and states."""
    unit = compilation(mlp(), "tp=2", optimizer=optimizer, memory=1)
    least = copies * 8 * (16 * 8 + 8 * 16) // 2
    with pytest.raises(PlanError, match=f"need at least {least:,} bytes per rank"):
        through("place", unit)


def test_the_memory_bound_counts_master_weights() -> None:
    """Parameters, gradients and moments in another dtype, and the parameters to compute with."""
    options: dict[str, Any] = {"optimizer": AdamW(), "master": torch.float32, "memory": 1}
    least = (8 + 4 * 4) * (16 * 8 + 8 * 16) // 2
    with pytest.raises(PlanError, match=f"need at least {least:,} bytes per rank"):
        through("place", compilation(mlp(), "tp=2", **options))
