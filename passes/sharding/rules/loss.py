"""Losses of ATen: their mean is a sum of shares, where no count depends on data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import ops

from msc.passes.sharding.rule import LocalCall, Localize, Localized, Rule
from msc.passes.sharding.rules.binding import Bound, Line, derived, with_arguments
from msc.passes.sharding.rules.notation import from_notation

aten = ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction=`."""


def elementwise_loss(*targets: Any) -> Line:
    """A line for losses that compare tensors element by element, then reduce.

    None unless the tensors have one shape; weights may broadcast.
    """

    def build(bound: Bound) -> Rule | None:
        compared = [name for name in bound.tensor_arguments() if "weight" not in name]
        shapes = {bound.shape(name) for name in compared}
        if len(shapes) != 1:
            return None
        (shape,) = shapes
        if bound.values["reduction"] == NONE:
            return from_notation(bound, _terms(bound, "..."))
        dims = "".join(chr(ord("a") + d) for d in range(len(shape)))
        return from_notation(
            bound,
            _terms(bound, dims, ""),
            localize=_share_of_mean(shape) if bound.values["reduction"] == MEAN else None,
        )

    return derived(build, *targets)


def _terms(bound: Bound, term: str, result: str = "...") -> str:
    return ",".join([term] * len(bound.tensor_arguments())) + "->" + result


def scaled_loss(target: Any, scale: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    """This rank's share of a mean loss: its sum times one over the global count."""
    return aten.mul.Tensor(target(*args, **kwargs), scale)  # type: ignore[no-any-return]


def _share_of_mean(shape: Sequence[int]) -> Localize:
    count = math.prod(shape)

    def localize(local: LocalCall) -> Localized:
        target, args, kwargs = with_arguments(local, reduction=SUM)
        return scaled_loss, (target, 1.0 / max(count, 1), *args), kwargs

    return localize


def _cross_entropy(bound: Bound) -> Rule | None:
    """Classes stay whole. A mean divides by a count that depends on data."""
    rank = len(bound.shape("self"))
    if rank != 2 or len(bound.shape("target")) != 1:
        return None
    reduction = bound.values["reduction"]
    whole = "vn" if reduction == MEAN else "v"
    result = "n" if reduction == NONE else ""
    return from_notation(bound, f"nv,n,v->{result}", whole=whole)


LOSS = [
    elementwise_loss(aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss),
    elementwise_loss(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits),
    elementwise_loss(aten.kl_div, aten.soft_margin_loss, aten.hinge_embedding_loss),
    elementwise_loss(aten.poisson_nll_loss, aten.margin_ranking_loss),
    derived(_cross_entropy, aten.cross_entropy_loss, aten.nll_loss_nd),
]
