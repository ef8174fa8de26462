"""A norm takes the sum before it, and its gradient the sum behind it, where nothing speaks against
it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from msc.ir.ops.norm import RMS_NORM, RMS_NORM_BACKWARD
from msc.passes.fuse_norm_sums import fuse_sums_of
from tests.passes.graphs import ATEN, Forward, evaluate, random_values

Build = Callable[[Forward], fx.GraphModule]
LAYER_NORM = ATEN.native_layer_norm.default
LAYER_NORM_BACKWARD = ATEN.native_layer_norm_backward.default


def fused(build: Build) -> tuple[set[str], list[str]]:
    """The ops of the graph behind it, and the reasons of what is left; bits are kept."""
    before, gm = build(Forward()), build(Forward())
    found = list(fuse_sums_of(gm, ""))
    gm.graph.lint()
    gm.recompile()
    values = random_values(before)
    pairs = zip(evaluate(gm, values), evaluate(before, values), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    ops = {str(n.target).removesuffix(".default") for n in gm.graph.nodes}
    return ops, [each.what for each in found if not each.changed]


def items(b: Forward, call: fx.Node) -> list[fx.Node]:
    return [b.call(operator.getitem, call, i) for i in range(len(call.meta["val"]))]


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_sum_before_a_norm(kind: str) -> None:
    def build(b: Forward) -> fx.GraphModule:
        total = b.call(ATEN.add.Tensor, b.input("x", 2, 3, 4), b.input("r", 2, 3, 4))
        weight = b.parameter("w", 4)
        if kind == "rms_norm":
            norm = b.call(RMS_NORM, total, weight, 1e-5)
        else:
            norm = b.call(LAYER_NORM, total, [4], weight, b.parameter("b", 4), 1e-5)
        return b.done(total, *items(b, norm))

    ops, reasons = fused(build)
    assert not reasons
    assert f"msc.add_{kind}" in ops
    assert "aten.add.Tensor" not in ops


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, True], [True, True, False]])
@pytest.mark.parametrize("first", [False, True])
def test_a_sum_behind_the_gradient_of_a_layer_norm(mask: list[bool], first: bool) -> None:
    def build(b: Forward) -> fx.GraphModule:
        gy, x, g = (b.input(name, 6, 4) for name in ("gy", "x", "g"))
        weight, bias = b.parameter("w", 4), b.parameter("b", 4)
        _, mean, rstd = items(b, b.call(LAYER_NORM, x, [4], weight, bias, 1e-5))
        norm = b.call(LAYER_NORM_BACKWARD, gy, x, [4], mean, rstd, weight, bias, mask)
        parts = [b.call(operator.getitem, norm, i) for i, wanted in enumerate(mask) if wanted]
        dx = parts[0]
        return b.done(b.call(ATEN.add.Tensor, *((dx, g) if first else (g, dx))), *parts[1:])

    ops, reasons = fused(build)
    assert not reasons
    assert "msc.layer_norm_backward_add" in ops
    assert "aten.add.Tensor" not in ops


def rms_gradient(b: Forward) -> tuple[fx.Node, fx.Node, fx.Node]:
    x, weight = b.input("x", 6, 4), b.parameter("w", 4)
    _, rstd = items(b, b.call(RMS_NORM, x, weight, 1e-5))
    dx, dw = items(b, b.call(RMS_NORM_BACKWARD, b.input("gy", 6, 4), x, weight, rstd))
    return dx, dw, b.input("g", 6, 4)


def test_a_sum_behind_the_gradient_of_a_root_mean_square_norm() -> None:
    def build(b: Forward) -> fx.GraphModule:
        dx, dw, g = rms_gradient(b)
        return b.done(b.call(ATEN.add.Tensor, g, dx), dw)

    ops, reasons = fused(build)
    assert not reasons
    assert "msc.rms_norm_backward_add" in ops


def _read_before(b: Forward) -> fx.GraphModule:
    total = b.call(ATEN.add.Tensor, b.input("x", 6, 4), b.input("r", 6, 4))
    early = b.call(ATEN.tanh.default, total)
    return b.done(*items(b, b.call(RMS_NORM, total, b.parameter("w", 4), 1e-5)), early)


def _broadcast(b: Forward) -> fx.GraphModule:
    total = b.call(ATEN.add.Tensor, b.input("x", 6, 4), b.input("r", 4))
    return b.done(*items(b, b.call(RMS_NORM, total, b.parameter("w", 4), 1e-5)))


def _gradient_read_twice(b: Forward) -> fx.GraphModule:
    dx, dw, g = rms_gradient(b)
    return b.done(b.call(ATEN.add.Tensor, g, dx), dx, dw)


def _weight_gradient_read_before(b: Forward) -> fx.GraphModule:
    dx, dw, g = rms_gradient(b)
    early = b.call(ATEN.tanh.default, dw)
    return b.done(b.call(ATEN.add.Tensor, g, dx), early)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_read_before, "something else reads the sum before the norm can be made"),
        (_broadcast, "the sum is of several shapes or dtypes"),
        (_gradient_read_twice, "something else reads the gradient without the sum"),
        (_weight_gradient_read_before, "the gradient of its weight is read before the sum"),
    ],
)
def test_what_is_left_alone(build: Build, reason: str) -> None:
    ops, reasons = fused(build)
    assert len(reasons) == 1
    assert re.search(reason, reasons[0])
    assert "aten.add.Tensor" in ops
