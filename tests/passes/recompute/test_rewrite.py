"""A block's backward recomputes what its forward does not save."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from msc.ir.communication import COLLECTIVES
from msc.ir.structure import output_nodes
from msc.passes.differentiate import Differentiated, differentiate
from msc.passes.recompute.policies import full, gathered
from msc.passes.recompute.rewrite import recompute, saved_nodes
from tests.passes.graphs import Forward, assert_text, compilation, evaluate, layers, through

ATEN = torch.ops.aten
MSC = torch.ops.msc


def layer(recompute: str = "none", mesh: str = "") -> Differentiated:
    unit = through("recompute", compilation(layers(2), mesh, recompute=recompute))
    return unit.variants[0].differentiated["block0"]


def test_a_full_layer_keeps_its_input_alone() -> None:
    found = layer("full")
    assert [node.name for node in saved_nodes(found)] == [
        "layers_0_down_weight",
        "x",
        "layers_0_up_weight",
    ]
    assert found.num_saved == 0
    assert found.backward is not None
    assert_text(
        found.backward,
        """
%primals_2: f64[8,16] = parameter "layers.0.down.weight"
%primals_3: f64[4,8] = input "x"
%layers_0_up_weight: f64[16,8] = parameter "layers.0.up.weight"
%tangents_1: f64[4,8] = gradient "add_tensor"
%linear: f64[4,16] = msc.linear(%primals_3, %layers_0_up_weight)  # layers.0.up
%relu: f64[4,16] = aten.relu(%linear)  # layers.0.act
%detach: f64[4,16] = aten.detach(%relu)  # layers.0.act
%linear_dgrad: f64[4,16] = msc.linear_dgrad(%tangents_1, %primals_2)  # layers.0.down
%linear_wgrad: f64[8,16] = msc.linear_wgrad(%tangents_1, %relu)  # layers.0.down
%detach_1: f64[4,16] = aten.detach(%detach)  # layers.0.act
%threshold_backward: f64[4,16] = aten.threshold_backward(%linear_dgrad, %detach_1, 0)  # layers.0.act
%linear_wgrad_1: f64[16,8] = msc.linear_wgrad(%threshold_backward, %primals_3)  # layers.0.up
return (%linear_wgrad_1, %linear_wgrad)
""",  # noqa: E501
    )


def test_only_what_the_backward_needs_runs_again() -> None:
    """The layer's second product and its sum are for the next layer alone."""
    found = layer("full")
    assert found.backward is not None
    again = [n.target for n in found.backward.graph.nodes if n.meta.get("phase") == "recompute"]
    assert again == [MSC.linear.default, ATEN.relu.default]


def test_values_from_outside_of_the_set_are_saved() -> None:
    before = layer()
    (relu,) = before.forward.graph.find_nodes(op="call_function", target=ATEN.relu.default)
    after = recompute(before, {relu})
    assert [node.name for node in output_nodes(after.forward)] == ["add", "linear"]
    assert [node.name for node in saved_nodes(after)][-1] == "linear"


def test_nothing_to_do_gives_the_block_itself() -> None:
    before = layer()
    assert recompute(before, set()) is before
    (add,) = before.forward.graph.find_nodes(op="call_function", target=ATEN.add.Tensor)
    assert recompute(before, {add}) is before  # it is not saved


def test_a_collective_runs_again_with_the_layout_around_it() -> None:
    """A value that every rank gathers from shards, and that the backward reads."""
    build = Forward()
    x, w = build.placeholder("value", "x", 2, 4), build.placeholder("parameter", "w", 8, 8)
    for node in (x, w):
        node.meta["differentiable"] = True
    whole = build.call(MSC.all_gather.default, x, 1, [4], "tp", 2, "reduce_scatter")
    before = differentiate(build.done(build.linear(whole, w)), build.mode)
    after = recompute(before, gathered(before.forward))
    assert [tuple(n.meta["val"].shape) for n in saved_nodes(before) if n.op != "placeholder"] == [
        (2, 8)
    ]
    assert {node.name for node in saved_nodes(after)} == {"x", "w"}
    assert after.backward is not None
    starts = [node.target for node in after.backward.graph.nodes if node.target in COLLECTIVES]
    assert sorted(COLLECTIVES[target] for target in starts) == ["all_gather", "reduce_scatter"]


def run(found: Differentiated, values: list[Tensor], tangent: Tensor) -> tuple[Tensor, ...]:
    results = evaluate(found.forward, values)
    kept = [
        values[item.index] if item.is_input else results[found.num_outputs + item.index]
        for item in found.saved
    ]
    assert found.backward is not None
    return evaluate(found.backward, [*kept, tangent])


def dropped_out() -> fx.GraphModule:
    build = Forward()
    weight = build.parameter("layers.0.weight", 8, 8)
    x = build.input("x", 4, 8)
    key = build.placeholder("rng", "rng", 2, dtype=torch.int64)
    hidden = build.linear(x, weight, "layers.0")
    instance = build.call(MSC.rng_key.default, key, 0, path="layers.0")
    dropped = build.call(
        MSC.dropout.default, hidden, 0.5, instance, [None, None], [4, 8], path="layers.0"
    )
    squared = build.call(ATEN.mul.Tensor, dropped, dropped, path="layers.0")
    head = build.parameter("head.weight", 8, 8)
    return build.done(build.call(ATEN.sum.default, build.linear(squared, head, "head")))


def test_a_mask_comes_out_the_same() -> None:
    unit = through("differentiate", compilation(dropped_out()))
    kept = unit.variants[0].differentiated["block0"]
    again = recompute(kept, full(kept.forward))
    assert kept.num_saved > 0
    assert again.num_saved == 0
    assert again.backward is not None
    masks = again.backward.graph.find_nodes(op="call_function", target=MSC.dropout.default)
    assert [node.meta["phase"] for node in masks] == ["recompute", "backward"]
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.tensor(17)
        if node.meta["val"].dim() == 0
        else torch.randn(node.meta["val"].shape, generator=generator, dtype=torch.float64)
        for node in kept.forward.graph.find_nodes(op="placeholder")
    ]
    tangent = torch.randn((), generator=generator, dtype=torch.float64)
    for one, other in zip(run(kept, values, tangent), run(again, values, tangent), strict=True):
        assert torch.equal(one, other)
        assert bool(one.any())
