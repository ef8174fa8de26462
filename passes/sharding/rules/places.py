"""Ops on images and sequences: pooling, resizing, windows. Samples and channels are free.

The places (`xyz` before, `pqr` after) stay whole, as neighbours see each other.
"""

from __future__ import annotations

from torch import ops

from msc.passes.sharding.rule import Rule
from msc.passes.sharding.rules.binding import Bound, derived, dim_of, dims_of
from msc.passes.sharding.rules.notation import from_notation, line

aten = ops.aten


def _unfold(bound: Bound) -> Rule:
    """Windows along one dim: it becomes their number, and their length a new last dim."""
    shape, result = bound.shape("self"), bound.result_shape()
    if not shape:
        return bound.rule({"self": ()}, [(dim_of("window", result[-1]),)], whole=["window"])
    dim = int(bound.values["dimension"]) % len(shape)
    dims = dims_of(shape)
    after = (*dims[:dim], dim_of("count", result[dim]), *dims[dim + 1 :])
    return bound.rule(
        {"self": tuple(dims)},
        [(*after, dim_of("window", result[-1]))],
        whole=[f"d{dim}", "count", "window"],
        linear=[["self"]],
    )


def _channel_shuffle(bound: Bound) -> Rule:
    """`n (g c) ... -> n (c g) ...`"""
    groups = int(bound.values["groups"])
    text = "n(gc)...->n(cg)..."
    return from_notation(bound, text, whole="g", lengths={"g": groups}, linear="self")


PLACES = [
    line("...x->...p", aten.avg_pool1d, aten.adaptive_avg_pool1d, whole="xp", linear="self"),
    line("...xy->...pq", aten.avg_pool2d, aten.adaptive_avg_pool2d, whole="xypq", linear="self"),
    line(
        "...xyz->...pqr", aten.avg_pool3d, aten.adaptive_avg_pool3d, whole="xyzpqr", linear="self"
    ),
    line("...x->...p", aten.max_pool1d, whole="xp"),
    line("...xy->...pq", aten.max_pool2d, whole="xypq"),
    line("...xyz->...pqr", aten.max_pool3d, whole="xyzpqr"),
    line("...x->...p,...p", aten.max_pool1d_with_indices, aten.adaptive_max_pool1d, whole="xp"),
    line("...xy->...pq,...pq", aten.max_pool2d_with_indices, whole="xypq"),
    line("...xy->...pq,...pq", aten.adaptive_max_pool2d, whole="xypq"),
    line("...xyz->...pqr,...pqr", aten.max_pool3d_with_indices, whole="xyzpqr"),
    line("...xyz->...pqr,...pqr", aten.adaptive_max_pool3d, whole="xyzpqr"),
    line(
        "...x->...p",
        aten.upsample_nearest1d.vec,
        aten._upsample_nearest_exact1d.vec,
        aten.upsample_linear1d.vec,
        whole="xp",
        linear="input",
    ),
    line(
        "...xy->...pq",
        aten.upsample_nearest2d.vec,
        aten._upsample_nearest_exact2d.vec,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bicubic2d.vec,
        aten._upsample_bilinear2d_aa.vec,
        aten._upsample_bicubic2d_aa.vec,
        whole="xypq",
        linear="input",
    ),
    line(
        "...xyz->...pqr",
        aten.upsample_nearest3d.vec,
        aten._upsample_nearest_exact3d.vec,
        aten.upsample_trilinear3d.vec,
        whole="xyzpqr",
        linear="input",
    ),
    line("ncxy,npqz->ncpq", aten.grid_sampler, whole="xypqz", linear="input"),
    line("...cxy->...(ck)p", aten.im2col, whole="kxyp", linear="self"),
    line("...(ck)p->...cxy", aten.col2im, whole="kxyp", linear="self"),
    line("...(ck)xy->...cpq", aten.pixel_shuffle, whole="kxypq", linear="self"),
    line("...cxy->...(ck)pq", aten.pixel_unshuffle, whole="kxypq", linear="self"),
    derived(_channel_shuffle, aten.channel_shuffle),
    derived(_unfold, aten.unfold),
]
