"""Losses of ATen: their mean is a sum of shares, where no count depends on data."""

from __future__ import annotations

from typing import Any

import torch
from torch import ops

from msc.passes.sharding.rule import LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import Bound, Line, derived, with_arguments
from msc.passes.sharding.rules.notation import from_notation

aten = ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction=`."""


def elementwise_loss(*targets: Any) -> Line:
    """A line for losses that compare `self` and `target` element by element, then reduce."""

    def build(bound: Bound) -> Rule | None:
        if bound.shape("self") != bound.shape("target"):
            return None
        if bound.values["reduction"] == NONE:
            return from_notation(bound, _terms(bound, "..."))
        dims = "".join(chr(ord("a") + d) for d in range(len(bound.shape("self"))))
        return from_notation(
            bound,
            _terms(bound, dims, ""),
            localize=_share_of_mean(bound) if bound.values["reduction"] == MEAN else None,
        )

    return derived(build, *targets)


def _terms(bound: Bound, term: str, result: str = "...") -> str:
    return ",".join([term] * len(bound.tensor_arguments())) + "->" + result


def scaled_loss(target: Any, scale: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    """This rank's share of a mean loss: its sum times one over the global count."""
    return aten.mul.Tensor(target(*args, **kwargs), scale)  # type: ignore[no-any-return]


def _share_of_mean(bound: Bound) -> Any:
    count = bound.tensors("self")[0].numel()

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
    elementwise_loss(aten.binary_cross_entropy),
    derived(_cross_entropy, aten.cross_entropy_loss, aten.nll_loss_nd),
]
