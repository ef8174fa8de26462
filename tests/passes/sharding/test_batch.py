"""Propagation of the batch through one graph: states, conflicts, and what is not separable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from msc.ir.placement import PARTIAL, VARYING, State, sharded
from msc.ir.structure import placeholders
from msc.passes.cut import mark_differentiable
from msc.passes.sharding.batch import BatchPlan, NotSeparableError, propagate_batch
from msc.passes.sharding.calls import Value
from tests.passes.graphs import ATEN, Forward, assert_parity

Write = Callable[[Forward, fx.Node, fx.Node], fx.Node]


def graph(write: Write) -> fx.GraphModule:
    """A parameter `w` [8,8], a batch `x` [4,8], and the sum of `write`'s result."""
    build = Forward()
    result = write(build, build.parameter("w", 8, 8), build.input("x", 4, 8))
    gm = build.done(result)
    mark_differentiable(gm)
    return gm


def propagate(
    gm: fx.GraphModule, whole: Callable[[fx.Node, Value], bool] = lambda node, operand: False
) -> BatchPlan:
    inputs = {n: sharded(0) for n in placeholders(gm) if n.meta["kind"] == "input"}
    return propagate_batch(gm, 2, inputs, whole)


def states(plan: BatchPlan) -> dict[str, str]:
    return {
        f"{node.name}[{index}]" if index else node.name: str(state)
        for (node, index), state in plan.states.items()
    }


def refused(write: Write) -> str:
    """`node: reason` of the call that combines samples."""
    with pytest.raises(NotSeparableError) as error:
        propagate(graph(write))
    return f"{error.value.node.name}: {error.value}"


def test_a_sum_over_samples_is_partial() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        y = build.call(ATEN.relu.default, build.linear(x, w))
        return build.call(ATEN.sum.default, y)

    gm = graph(write)
    plan = propagate(gm)
    assert states(plan) == {
        "w": "R~",
        "x": "S0",
        "linear_default": "S0",
        "relu_default": "S0",
        "sum_default": "P",
    }
    assert plan.outputs(gm) == [PARTIAL]
    assert [str(strategy) for strategy in plan.strategies.values()] == [
        "e_0: S0, R~ -> S0",
        "e_1: S0 -> S0",
        "d0: S0 -> P",
    ]


def test_the_batch_moves_with_its_dim() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        y = build.call(ATEN.reshape.default, build.linear(x, w), [4, 2, 4])
        y = build.call(ATEN.transpose.int, y, 0, 1)
        y = build.call(ATEN.reshape.default, y, [8, 4])
        return build.call(ATEN.sum.dim_IntList, y, [1])

    assert list(states(propagate(graph(write))).values())[3:] == ["S0", "S1", "S0/2", "S0/2"]


def test_what_does_not_depend_on_the_batch_is_whole() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        square = build.call(ATEN.sum.default, build.call(ATEN.mul.Tensor, w, w))
        return build.call(ATEN.mul.Tensor, build.call(ATEN.sum.default, x), square)

    found = states(propagate(graph(write)))
    assert found["sum_default"] == "R~"
    assert found["mul_tensor_1"] == "P"


def test_a_mean_is_a_sum_of_local_parts() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        return build.call(ATEN.mean.default, build.linear(x, w))

    assert states(propagate(graph(write)))["mean_default"] == "P"


def test_two_batch_dims_in_one_call_do_not_fit() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        scores = build.call(ATEN.mm.default, x, build.call(ATEN.t.default, x))
        return build.call(ATEN.sum.default, scores)

    assert refused(write) == "mm_default: combines samples of the batch"


def test_a_square_of_a_sum_is_no_sum() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        total = build.call(ATEN.sum.default, build.linear(x, w))
        return build.call(ATEN.mul.Tensor, total, total)

    assert refused(write) == "mul_tensor: combines samples of the batch"


def test_a_norm_over_the_batch_is_no_sum() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        y = build.call(ATEN.transpose.int, build.linear(x, w), 0, 1)
        return build.call(ATEN.softmax.int, y, -1)

    assert refused(write) == "softmax_int: combines samples of the batch"


def test_an_op_without_a_rule_says_so() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        product = build.call(ATEN.mm.default, build.call(ATEN.t.default, x), x)
        return build.call(torch.ops.aten.linalg_inv_ex.default, product)

    assert (
        refused(write) == "linalg_inv_ex_default: has no sharding rule, "
        "so that it may combine samples of the batch"
    )


def ratio(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
    """A partial loss over a partial count."""
    total = build.call(ATEN.sum.default, build.linear(x, w))
    count = build.call(ATEN.sum.default, x)
    return build.call(ATEN.div.Tensor, total, count)


def test_a_count_is_made_whole_before_a_loss() -> None:
    asked: list[str] = []

    def whole(node: fx.Node, operand: Value) -> bool:
        asked.append(f"{node.name} {operand[0].name}")
        return True

    plan = propagate(graph(ratio), whole)
    assert asked == ["div_tensor sum_default_1"]
    (strategy,) = [s for n, s in plan.strategies.items() if n.name == "div_tensor"]
    assert str(strategy) == "-: P, R~ -> P"


def test_operands_are_offered_one_after_the_other() -> None:
    asked: list[str] = []

    def whole(node: fx.Node, operand: Value) -> bool:
        asked.append(operand[0].name)
        return False

    with pytest.raises(NotSeparableError):
        propagate(graph(ratio), whole)
    assert asked == ["sum_default_1", "sum_default"]


def largest(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
    y = build.linear(x, w)
    scaled = build.call(ATEN.div.Tensor, y, build.call(ATEN.amax.default, y))
    return build.call(ATEN.sum.default, build.call(ATEN.sin.default, scaled))


def test_a_maximum_over_samples_keeps_its_gradient() -> None:
    """A maximum over ranks has no gradient, so a trainable one is taken of the whole."""
    assert refused(largest) == "amax_default: combines samples of the batch"
    plan = propagate(graph(largest), lambda node, operand: True)
    (strategy,) = [s for n, s in plan.strategies.items() if n.name == "amax_default"]
    assert str(strategy) == "-: R~ -> R~"
    assert_parity(graph(largest), "dp=2")


def test_a_maximum_of_inputs_is_one_over_the_ranks() -> None:
    def write(build: Forward, w: fx.Node, x: fx.Node) -> fx.Node:
        top = build.call(ATEN.amax.default, x)
        return build.call(ATEN.sum.default, build.call(ATEN.div.Tensor, build.linear(x, w), top))

    plan = propagate(graph(write), lambda node, operand: True)
    assert states(plan)["amax_default"] == "Pmax"
    assert_parity(graph(write), "dp=2")


def test_inputs_are_what_the_caller_says() -> None:
    gm = graph(lambda build, w, x: build.linear(x, w))
    (x,) = [node for node in placeholders(gm) if node.name == "x"]
    given: list[State] = [VARYING, sharded(1), PARTIAL]
    found = [propagate_batch(gm, 2, {x: s}, lambda n, o: False).outputs(gm) for s in given]
    assert [[str(state) for state in outputs] for outputs in found] == [["R~"], ["P"], ["P"]]
