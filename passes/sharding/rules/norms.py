"""Norms: what is normalized over stays whole."""

from __future__ import annotations

from torch import ops

import msc.ir.ops  # noqa: F401  registers them
from msc.passes.sharding.rule import Dims, LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import EMPTY, Bound, derived, dims_of, with_arguments
from msc.passes.sharding.rules.notation import from_notation, line

aten, msc_ops = ops.aten, ops.msc


def _over_last(bound: Bound) -> Rule:
    """layer_norm, rms_norm: over the last dims, those of `normalized_shape`."""
    dims = dims_of(bound.shape("input"))
    count = len(bound.values["normalized_shape"])
    leading = dims[: len(dims) - count]
    normalized = tuple(dims[len(dims) - count :])
    affine = [name for name in ("weight", "bias") if bound.positions.get(name)]
    statistics: Dims = (*leading, *[EMPTY] * count)
    return bound.rule(
        {"input": tuple(dims), **dict.fromkeys(affine, normalized)},
        [tuple(dims), *[statistics] * (len(bound.results) - 1)],
        whole=[f"d{d}" for d in range(len(leading), len(dims))],
    )


def _group_norm(bound: Bound) -> Rule:
    """Groups of channels are independent of each other."""
    groups = int(bound.values["num_groups"])
    channels = bound.shape("input")[1] // groups

    def localize(local: LocalCall) -> Localized:
        return with_arguments(local, num_groups=local.operand_shapes[0][1] // channels)

    return from_notation(
        bound,
        "n(gc)...,(gc),(gc)->n(gc)...",
        whole="c...",
        lengths={"g": groups},
        localize=localize,
    )


def _batch_norm(bound: Bound) -> Rule:
    """Channels are free; statistics of the batch need all of its samples and places."""
    whole = "n..." if bound.values["training"] else ""
    return from_notation(bound, "nc...,c,c,c,c->nc...", whole=whole)


NORMS = [
    derived(_batch_norm, aten.batch_norm),
    line("nc...,c,c,c,c->nc...", aten.instance_norm, whole="..."),
    derived(_over_last, aten.layer_norm, aten.native_layer_norm, aten.rms_norm),
    line("...n,n->...n,...", msc_ops.rms_norm, whole="n"),
    derived(_group_norm, aten.group_norm),
]
