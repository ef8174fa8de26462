"""The joint graph of a block, cut in two: what is saved, what has a gradient, what is refused."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from msc.ir.errors import VerifyError
from msc.ir.structure import output_nodes, placeholders
from msc.passes.cut import mark_differentiable
from msc.passes.differentiate import Differentiated, Saved, differentiate
from tests.passes.graphs import (
    ATEN,
    GPT,
    Forward,
    assert_parity,
    assert_text,
    captured,
    evaluate,
    random_values,
    text,
    through,
    token_batch,
)


def differentiated(gm: fx.GraphModule) -> Differentiated:
    mark_differentiable(gm)
    return differentiate(gm, gm.meta["fake_mode"])


def gradients(found: Differentiated, values: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    """Run forward and backward by hand, with a tangent for every output."""
    assert found.backward is not None
    results = evaluate(found.forward, values)
    stored = results[found.num_outputs :]
    assert len(stored) == found.num_saved
    saved = [values[s.index] if s.is_input else stored[s.index] for s in found.saved]
    return list(evaluate(found.backward, [*saved, *(tangents[i] for i in found.tangents)]))


def assert_gradients(gm: fx.GraphModule) -> Differentiated:
    """Values and gradients are those of eager autograd."""
    found = differentiated(gm)
    values = random_values(gm)
    leaves = [
        value.clone().requires_grad_(bool(node.meta["differentiable"]))
        for value, node in zip(values, placeholders(gm), strict=True)
    ]
    outputs = evaluate(gm, leaves)
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in outputs]
    pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if o.requires_grad]
    total = sum((o * t).sum() for o, t in pairs)
    assert isinstance(total, Tensor)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    expected = torch.autograd.grad(total, wanted, allow_unused=True)
    by_index = dict(zip([i for i, v in enumerate(leaves) if v.requires_grad], expected))  # noqa: B905
    results = evaluate(found.forward, values)
    torch.testing.assert_close(results[: found.num_outputs], outputs)
    for index, grad in zip(found.gradients, gradients(found, values, tangents), strict=True):
        torch.testing.assert_close(grad, by_index[index])
    assert {i for i, grad in by_index.items() if grad is not None} == set(found.gradients)
    return found


def norm_and_linear() -> fx.GraphModule:
    build = Forward()
    w, gain, x = build.parameter("w", 8, 8), build.parameter("gain", 8), build.input("x", 4, 8)
    y = build.call(ATEN.layer_norm.default, build.linear(x, w, "up"), [8], gain, path="norm")
    return build.done(build.call(ATEN.relu.default, y, path="act"))


def test_what_the_backward_reads_is_saved() -> None:
    found = assert_gradients(norm_and_linear())
    assert found.backward is not None
    assert_text(
        found.forward,
        """
%w: f64[8,8] = parameter "w"
%gain: f64[8] = parameter "gain"
%x: f64[4,8] = input "x"
%linear: f64[4,8] = msc.linear(%x, %w)  # up
%native_layer_norm: (f64[4,8], f64[4,1], f64[4,1]) = aten.native_layer_norm(%linear, [8], %gain,\
 None, 1e-05)  # norm
%getitem: f64[4,8] = %native_layer_norm[0]  # norm
%getitem_1: f64[4,1] = %native_layer_norm[1]  # norm
%getitem_2: f64[4,1] = %native_layer_norm[2]  # norm
%relu: f64[4,8] = aten.relu(%getitem)  # act
return (%relu, %relu, %linear, %getitem_1, %getitem_2)
""",
    )
    assert_text(
        found.backward,
        """
%relu: f64[4,8] = saved "relu"
%linear: f64[4,8] = saved "linear"
%getitem_1: f64[4,1] = saved "getitem_1"
%getitem_2: f64[4,1] = saved "getitem_2"
%primals_2: f64[8] = parameter "gain"
%primals_3: f64[4,8] = input "x"
%tangents_1: f64[4,8] = gradient "relu_default"
%detach: f64[4,8] = aten.detach(%relu)  # act
%detach_1: f64[4,8] = aten.detach(%detach)  # act
%threshold_backward: f64[4,8] = aten.threshold_backward(%tangents_1, %detach_1, 0)  # act
%native_layer_norm_backward: (f64[4,8], f64[8], none) = aten.native_layer_norm_backward(\
%threshold_backward, %linear, [8], %getitem_1, %getitem_2, %primals_2, None,\
 [True, True, False])  # norm
%getitem_3: f64[4,8] = %native_layer_norm_backward[0]  # norm
%getitem_4: f64[8] = %native_layer_norm_backward[1]  # norm
%linear_wgrad: f64[8,8] = msc.linear_wgrad(%getitem_3, %primals_3)  # up
return (%linear_wgrad, %getitem_4)
""",
    )
    inputs = [s.index for s in found.saved if s.is_input]
    assert inputs == [1, 2]  # the gain and x; the weight is not needed where x has no gradient
    assert found.saved[0] == Saved(False, 0)
    assert (found.num_saved, found.tangents, found.gradients) == (4, (0,), (0, 1))


def test_a_linear_saves_no_value_of_its_own() -> None:
    build = Forward()
    w, x = build.parameter("w", 8, 8), build.parameter("x", 4, 8)
    found = assert_gradients(build.done(build.linear(x, w)))
    assert (found.num_saved, found.saved) == (0, (Saved(True, 0), Saved(True, 1)))


def test_no_product_with_one_is_left() -> None:
    """The gradient of addcmul multiplies by its `value`, which is one unless it is given."""
    build = Forward()
    w, b = build.parameter("w", 6), build.parameter("b", 6)
    x = build.call(ATEN.sin.default, build.input("x", 4, 6))
    found = assert_gradients(build.done(build.call(ATEN.addcmul.default, b, x, w)))
    assert found.backward is not None
    assert not found.backward.graph.find_nodes(op="call_function", target=ATEN.mul.Scalar)


def test_only_tensors_are_saved() -> None:
    """Of several results only those that are read; never the tuple."""
    unit = through("differentiate", captured(GPT(), "", token_batch()))
    for found in unit.variants[0].differentiated.values():
        outputs = output_nodes(found.forward)
        assert len(outputs) == found.num_outputs + found.num_saved
        assert all(isinstance(node.meta["val"], Tensor) for node in outputs)
        stored = outputs[found.num_outputs :]
        assert len(set(stored)) == len(stored)
        assert found.backward is not None
        reads = placeholders(found.backward)
        assert len(reads) == len(found.saved) + len(found.tangents)
        assert all(node.users for node in reads)


def test_every_trainable_parameter_has_a_gradient() -> None:
    unit = through("differentiate", captured(GPT(), "", token_batch()))
    for name, found in unit.variants[0].differentiated.items():
        nodes = placeholders(unit.variants[0].local[name].gm)
        with_gradient = {nodes[i].name for i in found.gradients}
        assert with_gradient == {node.name for node in nodes if node.meta.get("differentiable")}


@given(st.lists(st.sampled_from(["linear", "sin", "softmax", "scale", "add"]), max_size=6))
@settings(max_examples=25, deadline=None)
def test_gradients_are_those_of_autograd(ops: list[str]) -> None:
    build = Forward()
    w, gain, x = build.parameter("w", 8, 8), build.parameter("gain", 8), build.parameter("x", 4, 8)
    y = build.linear(x, w)
    for op in ops:
        if op == "linear":
            y = build.linear(y, w)
        elif op == "scale":
            y = build.call(ATEN.mul.Tensor, y, gain)
        elif op == "add":
            y = build.call(ATEN.add.Tensor, y, x)
        else:
            arguments = (-1,) if op == "softmax" else ()
            overload = "int" if op == "softmax" else "default"
            y = build.call(getattr(getattr(ATEN, op), overload), y, *arguments)
    found = assert_gradients(build.done(y, build.call(ATEN.sum.default, y)))
    assert (1 in found.gradients) == ("scale" in ops)


def test_a_used_parameter_without_a_gradient_is_refused() -> None:
    build = Forward()
    w, x = build.parameter("layers.0.weight", 8, 8), build.parameter("x", 4, 8)
    lost = build.call(ATEN.detach.default, w)
    gm = build.done(build.linear(x, lost))
    assert differentiated(gm).gradients == (1,)  # detached on purpose
    for node in gm.graph.nodes:
        if node.target is ATEN.detach.default:
            node.meta["differentiable"] = True  # as an op says that should have a gradient
    w.meta["differentiable"] = True
    with pytest.raises(VerifyError) as error:
        differentiate(gm, gm.meta["fake_mode"])
    assert str(error.value) == (
        'differentiate: parameter "layers.0.weight" is used and trainable, but its block has no '
        "gradient for it. An op on its way to the loss has lost its gradient."
    )


def test_an_unused_parameter_has_none() -> None:
    build = Forward()
    w, x = build.parameter("w", 8, 8), build.parameter("x", 4, 8)
    build.parameter("unused", 3)
    assert assert_gradients(build.done(build.linear(x, w))).gradients == (0, 1)


def test_a_frozen_block_has_no_backward() -> None:
    build = Forward()
    w, x = build.parameter("w", 8, 8, trains=False), build.input("x", 4, 8)
    gm = build.done(build.linear(x, w))
    found = differentiated(gm)
    assert (found.backward, found.num_saved, found.gradients) == (None, 0, ())
    assert text(found.forward) == text(gm)


def test_outputs_that_are_views_of_inputs_are_copied() -> None:
    build = Forward()
    w, x = build.parameter("w", 8, 8), build.input("x", 4, 8)
    view = build.call(ATEN.t.default, w)
    found = assert_gradients(build.done(view, w, build.linear(x, w)))
    assert_text(
        found.forward,
        """
%w: f64[8,8] = parameter "w"
%x: f64[4,8] = input "x"
%t: f64[8,8] = aten.t(%w)
%linear: f64[4,8] = msc.linear(%x, %w)
%clone: f64[8,8] = aten.clone(%t)
%clone_1: f64[8,8] = aten.clone(%w)
return (%clone, %clone_1, %linear)
""",
    )


def viewed(base_too: bool) -> fx.GraphModule:
    """Two layers; the second reads the first one's result, a view of it, and another view."""
    build = Forward()
    first, second = build.parameter("layers.0.w", 8, 8), build.parameter("layers.1.w", 8, 8)
    x = build.input("x", 4, 8)
    y = build.linear(x, first, "layers.0")
    view = build.call(ATEN.reshape.default, y, [8, 4], path="layers.0")
    turned = build.call(ATEN.t.default, y, path="layers.0")
    z = build.linear(y if base_too else x, second, "layers.1")
    total = build.call(ATEN.sum.default, z, path="layers.1")
    for part in (view, turned):
        sine = build.call(ATEN.sin.default, part, path="layers.1")
        part_sum = build.call(ATEN.sum.default, sine, path="layers.1")
        total = build.call(ATEN.add.Tensor, total, part_sum, path="layers.1")
    return build.done(total)


@pytest.mark.parametrize("base_too", [True, False])
@pytest.mark.parametrize("mesh", ["", "pp=2"])
def test_gradients_come_in_by_every_view_of_an_output(base_too: bool, mesh: str) -> None:
    unit = assert_parity(viewed(base_too), mesh)
    found = unit.variants[0].differentiated["block0"]
    assert found.tangents == ((0, 1, 2) if base_too else (0, 1))


def test_an_output_may_be_returned_twice() -> None:
    build = Forward()
    w, x = build.parameter("w", 8, 8), build.input("x", 4, 8)
    y = build.linear(x, w)
    assert assert_gradients(build.done(y, y)).tangents == (0, 1)


def test_gradients_of_picked_results() -> None:
    build = Forward()
    x = build.parameter("x", 4, 8)
    parts = build.call(ATEN.split.Tensor, x, 4, 1)
    left, right = (build.call(operator.getitem, parts, i) for i in range(2))
    product = build.call(ATEN.mul.Tensor, left, right)
    assert assert_gradients(build.done(product)).gradients == (0,)
