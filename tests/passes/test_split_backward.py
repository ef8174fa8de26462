"""The backward in two halves: which call is in which, and what is kept between them."""

from __future__ import annotations

import operator

import pytest
import torch

from msc.ir.structure import placeholders
from msc.passes.compilation import Compilation
from msc.runtime.memory.predict import MemoryPredictor
from tests.passes.graphs import ATEN, Forward, assert_text, compilation, layers, through

LAYER_NORM = ATEN.native_layer_norm.default


def split(schedule: str = "zb-h1") -> Compilation:
    return through("split-backward", compilation(layers(2), "pp=2", schedule=schedule))


def test_input_gradients_first() -> None:
    unit = split()
    assert "block0.backward" not in unit.graphs
    assert_text(
        unit.graphs["block1.input_backward"],
        """
%relu: f64[4,16] = saved "relu"
%primals_2: f64[8,16] = parameter "layers.1.down.weight"
%primals_1: f64[16,8] = parameter "layers.1.up.weight"
%primals_3: f64[4,8] = value "add_tensor"  # layers.0
%tangents_1: f64[4,8] = gradient "add_tensor_1"
%detach: f64[4,16] = aten.detach(%relu)  # layers.1.act
%linear_dgrad: f64[4,16] = msc.linear_dgrad(%tangents_1, %primals_2)  # layers.1.down
%detach_1: f64[4,16] = aten.detach(%detach)  # layers.1.act
%threshold_backward: f64[4,16] = aten.threshold_backward(%linear_dgrad, %detach_1, 0)\
  # layers.1.act
%linear_dgrad_default: f64[4,8] = msc.linear_dgrad(%threshold_backward, %primals_1, False,\
 %tangents_1)  # layers.1.up
return (%linear_dgrad_default, %threshold_backward)
""",
    )
    assert_text(
        unit.graphs["block1.weight_backward"],
        """
%relu: f64[4,16] = saved "relu"
%primals_3: f64[4,8] = value "add_tensor"  # layers.0
%tangents_1: f64[4,8] = gradient "add_tensor_1"
%threshold_backward: f64[4,16] = saved "threshold_backward"
%linear_wgrad: f64[8,16] = msc.linear_wgrad(%tangents_1, %relu)  # layers.1.down
%linear_wgrad_1: f64[16,8] = msc.linear_wgrad(%threshold_backward, %primals_3)  # layers.1.up
return (%linear_wgrad_1, %linear_wgrad)
""",
    )


def test_other_schedules_keep_the_backward_whole() -> None:
    unit = split("1f1b")
    assert all(programs.halves is None for programs in unit.variants[0].differentiated.values())
    assert "block1.backward" in unit.graphs


def test_what_one_call_gives_to_both_halves_is_picked_at_once() -> None:
    """The gradients of a layer norm are one call: not its whole tuple is kept."""
    build = Forward()
    scale, shift = build.parameter("layers.0.scale", 8), build.parameter("layers.0.shift", 8)
    x = build.linear(build.input("x", 4, 8), build.parameter("first.weight", 8, 8), "first")
    norm = build.call(LAYER_NORM, x, [8], scale, shift, 1e-5, path="layers.0")
    y = build.call(operator.getitem, norm, 0, path="layers.0")
    out = build.linear(y, build.parameter("layers.1.weight", 8, 8), "layers.1")
    gm = build.done(build.call(ATEN.sum.default, out, path="layers.1"))
    unit = through("split-backward", compilation(gm, "pp=2", schedule="zb-h1"))
    for programs in unit.variants[0].differentiated.values():
        assert programs.halves is not None
        kept = placeholders(programs.halves.weights)
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in kept)


def order_of_held(gm: torch.fx.GraphModule) -> int:
    """The most pairs of chunk and micro-batch whose saved values wait for a reader, by graph."""
    calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    change: dict[int, int] = {}
    for call in calls:
        if not str(call.target).endswith("_forward"):
            continue
        stored = [user for user in call.users if user.args[1] == 2]
        items = [item for each in stored for item in each.users]
        readers = [position[reader] for item in items for reader in item.users]
        change[position[call]] = change.get(position[call], 0) + 1
        change[max(readers)] = change.get(max(readers), 0) - 1
    held = most = 0
    for index in sorted(change):
        held += change[index]
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("gpipe", None, [8, 8]),
        ("1f1b", None, [2, 1]),
        ("interleaved", 2, [5, 3]),
        ("zb-h1", None, [2, 2]),
        ("zb-v", None, [4, 4]),
    ],
)
def test_a_rank_holds_the_activations_that_its_schedule_says(
    schedule: str, virtual: int | None, expected: list[int]
) -> None:
    unit = compilation(layers(4, samples=8), "pp=2", 8, schedule=schedule, virtual_stages=virtual)
    unit = through("build-rank-graphs", unit)
    assert [order_of_held(gm) for gm in unit.rank_graphs] == expected
    assert all(MemoryPredictor().bytes(gm) > 0 for gm in unit.rank_graphs)
