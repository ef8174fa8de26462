"""What is found behind products, what becomes of it, and for what reasons not."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from msc.ir.ops.epilogue import LINEAR_EPILOGUE
from msc.ir.ops.gate import GATED, LINEAR_GATED
from msc.passes.fuse_epilogue.places import places
from msc.passes.fuse_epilogue.rewrite import fuse
from tests.passes.graphs import ATEN, LINEAR, Forward, evaluate, random_values

Build = Callable[[Forward], fx.GraphModule]


def fused(build: Build) -> tuple[fx.GraphModule, list[str]]:
    """The graph with all that can be fused, and the reasons of the rest; numbers are kept."""
    before, gm = build(Forward()), build(Forward())
    reasons = []
    for place in places(gm):
        if place.reason:
            reasons.append(place.reason)
        else:
            fuse(place)
    gm.graph.lint()
    gm.recompile()
    values = random_values(before)
    pairs = zip(evaluate(gm, values), evaluate(before, values), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found.stride() == expected.stride()
    return gm, reasons


def options(gm: fx.GraphModule, target: Any) -> list[tuple[Any, ...]]:
    """What the calls of an op are given besides tensors."""
    found = gm.graph.find_nodes(op="call_function", target=target)
    return [tuple(arg for arg in node.args if not isinstance(arg, fx.Node)) for node in found]


def product(b: Forward, name: str = "w", bias: bool = False, x: Any = None) -> tuple[Any, Any]:
    x = b.input("x", 2, 3, 4) if x is None else x
    weight = b.parameter(name, 6, 4)
    rest = (b.parameter(f"{name}_b", 6),) if bias else ()
    return x, b.call(LINEAR, x, weight, *rest, path=name)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("keep", [False, True])
def test_an_activation(name: str, keep: bool) -> None:
    def build(b: Forward) -> fx.GraphModule:
        _, y = product(b, bias=True)
        if name == "gelu_tanh":
            a = b.call(ATEN.gelu.default, y, approximate="tanh")
        else:
            a = b.call(getattr(ATEN, name).default, y)
        return b.done(a, *[y] * keep)

    gm, reasons = fused(build)
    assert not reasons
    assert options(gm, LINEAR_EPILOGUE) == [(None, name, keep, False)]
    assert not gm.graph.find_nodes(op="call_function", target=LINEAR)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_sum(first: bool, bias: bool) -> None:
    def build(b: Forward) -> fx.GraphModule:
        _, y = product(b, bias=bias)
        other = b.call(ATEN.tanh.default, b.input("r", 2, 3, 6))
        return b.done(b.call(ATEN.add.Tensor, *((y, other) if first else (other, y))))

    gm, reasons = fused(build)
    assert not reasons
    assert options(gm, LINEAR_EPILOGUE) == [(*[None] * (not bias), "", False, False)]


def test_a_sum_behind_an_activation_that_is_kept() -> None:
    def build(b: Forward) -> fx.GraphModule:
        _, y = product(b)
        a = b.call(ATEN.gelu.default, y)
        return b.done(b.call(ATEN.add.Tensor, b.input("r", 2, 3, 6), a), y)

    gm, reasons = fused(build)
    assert not reasons
    assert options(gm, LINEAR_EPILOGUE) == [(None, "gelu", True, False)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_gate_of_two_products(keep: bool) -> None:
    def build(b: Forward) -> fx.GraphModule:
        x, gate = product(b, "gate")
        _, up = product(b, "up", x=x)
        return b.done(b.call(GATED, gate, up, "silu"), *[up, gate] * keep)

    gm, reasons = fused(build)
    assert not reasons
    assert options(gm, LINEAR_GATED) == [("silu", keep, False)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_gate_of_the_halves_of_one_product(keep: bool) -> None:
    def build(b: Forward) -> fx.GraphModule:
        _, y = product(b)
        gate, up = halves(b, y)
        return b.done(b.call(GATED, gate, up, "gelu"), *[up] * keep)

    gm, reasons = fused(build)
    assert not reasons
    assert options(gm, LINEAR_GATED) == [(None, "gelu", keep, False)]


def halves(b: Forward, y: fx.Node) -> list[fx.Node]:
    split = b.call(ATEN.split_with_sizes.default, y, [3, 3], -1)
    return [b.call(operator.getitem, split, index) for index in range(2)]


def _read_twice(b: Forward) -> fx.GraphModule:
    _, y = product(b)
    return b.done(b.call(ATEN.add.Tensor, b.input("r", 2, 3, 6), y), y)


def _broadcast(b: Forward) -> fx.GraphModule:
    _, y = product(b)
    return b.done(b.call(ATEN.add.Tensor, y, b.input("r", 3, 6)))


def _behind_a_view(b: Forward) -> fx.GraphModule:
    _, y = product(b)
    return b.done(b.call(ATEN.relu.default, b.call(ATEN.view.default, y, [6, 6])))


def _two_values(b: Forward) -> fx.GraphModule:
    _, gate = product(b, "gate")
    _, up = product(b, "up", x=b.input("z", 2, 3, 4))
    return b.done(b.call(GATED, gate, up, "silu"))


def _with_bias(b: Forward) -> fx.GraphModule:
    x, gate = product(b, "gate")
    _, up = product(b, "up", bias=True, x=x)
    return b.done(b.call(GATED, gate, up, "silu"))


def _turned(b: Forward) -> fx.GraphModule:
    _, y = product(b)
    gate, up = halves(b, y)
    return b.done(b.call(GATED, up, gate, "silu"))


def _early(b: Forward) -> fx.GraphModule:
    x, gate = product(b, "gate")
    early = b.call(ATEN.tanh.default, gate)
    _, up = product(b, "up", x=x)
    return b.done(b.call(GATED, gate, up, "silu"), early)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_read_twice, "something else reads the product without the sum"),
        (_broadcast, r"torch.float64 \(3, 6\) is not of the product's shape and dtype"),
        (_behind_a_view, "aten.view stands between the product and it"),
        (_two_values, "gate and up are products of two values"),
        (_with_bias, "adds no bias to the products that it multiplies"),
        (_turned, "gate and up are not its halves in order"),
        (_early, "one product is read before the other can be made"),
    ],
)
def test_what_is_left_alone(build: Build, reason: str) -> None:
    gm, reasons = fused(build)
    assert len(reasons) == 1
    assert re.search(reason, reasons[0])
    targets = {node.target for node in gm.graph.nodes}
    assert not targets & {LINEAR_EPILOGUE, LINEAR_GATED}


def test_what_no_product_is_behind_is_no_place() -> None:
    b = Forward()
    x = b.input("x", 2, 3)
    y = b.call(ATEN.relu.default, b.call(ATEN.add.Tensor, x, x))
    assert not list(places(b.done(y)))
