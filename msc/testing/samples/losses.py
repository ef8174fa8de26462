"""Sample calls of losses."""

from __future__ import annotations

from typing import Any

from torch import ops

from msc.ir.torch_private import OpOverload
from msc.testing.samples.draw import Draw, samples

aten = ops.aten


@samples(aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss)
def _loss(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(shape), draw.pick([0, 1, 2])


@samples(aten.binary_cross_entropy, constant=(2,))
def _binary_cross_entropy(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    weight = draw.unit(shape) if draw.flag() else None
    return draw.unit(shape), draw.truths(shape).to(draw.dtype), weight, draw.pick([0, 1, 2])


@samples(aten.cross_entropy_loss, aten.nll_loss_nd, constant=(2,))
def _cross_entropy(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rows, classes = draw.length(), draw.length()
    weight = draw.unit([classes]) if draw.flag() else None
    reduction = draw.pick([0, 1, 2])
    return draw.normal([rows, classes]), draw.integers([rows], classes), weight, reduction


@samples(aten.binary_cross_entropy_with_logits, constant=(1, 2, 3))
def _binary_cross_entropy_with_logits(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    weight = draw.unit(draw.broadcast(shape)) if draw.flag() else None
    positive = draw.unit(shape[-1:]) if draw.flag() else None
    return draw.normal(shape), draw.unit(shape), weight, positive, draw.pick([0, 1, 2])


@samples(aten.kl_div)
def _kl_div(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.unit(shape), draw.pick([0, 1, 2]), {"log_target": draw.flag()}


@samples(aten.soft_margin_loss, constant=(1,))
def _soft_margin(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(shape).sign(), draw.pick([0, 1, 2])


@samples(aten.hinge_embedding_loss, constant=(1,))
def _hinge(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(shape).sign(), 1.0, draw.pick([0, 1, 2])


@samples(aten.poisson_nll_loss, constant=(1,))
def _poisson(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return (
        draw.normal(shape),
        draw.unit(shape),
        draw.flag(),
        draw.flag(),
        1e-8,
        draw.pick([0, 1, 2]),
    )


@samples(aten.margin_ranking_loss, constant=(2,))
def _margin_ranking(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    tensors = draw.normal(shape), draw.normal(shape), draw.normal(shape).sign()
    return *tensors, 0.5, draw.pick([0, 1, 2])
