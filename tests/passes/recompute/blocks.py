"""Small differentiated blocks whose values can be saved or computed again."""

from __future__ import annotations

import operator

import torch

from msc.passes.differentiate import Differentiated, differentiate
from tests.passes.graphs import Forward

ATEN = torch.ops.aten


def mlp() -> Differentiated:
    """A gated product: values of different sizes, one of them a view."""
    build = Forward()
    x = build.placeholder("value", "x", 4, 8, differentiable=True)
    up = build.placeholder("parameter", "up", 32, 8, differentiable=True)
    down = build.placeholder("parameter", "down", 8, 32, differentiable=True)
    hidden = build.linear(x, up)
    active = build.call(ATEN.gelu.default, hidden)
    turned = build.call(ATEN.transpose.int, active, 0, 1)
    back = build.call(ATEN.transpose.int, turned, 0, 1)
    gated = build.call(ATEN.mul.Tensor, back, build.call(ATEN.tanh.default, hidden))
    return differentiate(build.done(build.linear(gated, down)), build.mode)


def normed() -> Differentiated:
    """A call of several results, of which some are saved."""
    build = Forward()
    x = build.placeholder("value", "x", 4, 8, differentiable=True)
    scale = build.placeholder("parameter", "scale", 8, differentiable=True)
    shift = build.placeholder("parameter", "shift", 8, differentiable=True)
    whole = build.call(ATEN.native_layer_norm.default, x, [8], scale, shift, 1e-5)
    y = build.graph.call_function(operator.getitem, (whole, 0))
    y.meta["val"] = whole.meta["val"][0]
    squared = build.call(ATEN.mul.Tensor, y, y)
    return differentiate(build.done(build.call(ATEN.tanh.default, squared)), build.mode)
