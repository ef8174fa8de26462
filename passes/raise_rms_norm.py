"""Raise root mean square norms that are written out to `msc.rms_norm`.

    %q = aten.pow.Tensor_Scalar(%x, 2)
    %m = aten.mean.dim(%q, [-1], True)
    %r = aten.rsqrt(%m + eps)             ->    %y, %r = msc.rms_norm(%x, %w, eps)
    %z = %x * %r
    %y = %w * %z

So the backward reads the stream and one number per row, in place of a normalized copy as well, and
kernels can do it in one pass. `passes/rewrites/norms.py` says what is found; `aten.rms_norm` is
raised as well. Left alone is a norm without a weight, with a shift, with a weight of another
dtype, and one that is computed in less than the stream's own precision, as with a cast to float32
in a float64 model.

Numerics: float32 and float64 as before; half types are rounded once, at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.ops.library import compute_dtype
from msc.ir.passes import GraphPass
from msc.passes.normalize.dead_code import remove_dead_code
from msc.passes.normalize.rewrite import Emitter, replace
from msc.passes.rewrites.norms import Norm, norms_of
from msc.passes.rewrites.origins import Origins


@dataclass(frozen=True)
class RaiseRMSNorm(GraphPass):
    """Raise every root mean square norm that has a weight."""

    name: ClassVar[str] = "raise-rms-norm"
    numerics: ClassVar[str] = "norms of half types are rounded once, at the end"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        origins = Origins(gm)
        found = [norm for stream in gm.graph.nodes for norm in _raisable(stream, origins)]
        raised: dict[fx.Node, fx.Node] = {}  # the stream of one may be what another gave
        for norm in found:
            raised[norm.output] = _raise(gm, norm, raised)
        if found:
            remove_dead_code(gm)
        return len(found)


def _raisable(stream: fx.Node, origins: Origins) -> list[Norm]:
    value = stream.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return []
    return [norm for norm in norms_of(stream, origins) if _fits(norm, value.dtype)]


def _fits(norm: Norm, dtype: torch.dtype) -> bool:
    scale, shift = norm.vectors
    if norm.form[0] != "rms_norm" or scale is None or shift is not None:
        return False
    dtypes = {dtype, norm.output.meta["val"].dtype, scale.meta["val"].dtype}
    inside = {node.meta["val"].dtype for node in norm.nodes}
    return dtypes == {dtype} and inside <= {dtype, compute_dtype(dtype)}


def _raise(gm: fx.GraphModule, norm: Norm, raised: Mapping[fx.Node, fx.Node]) -> fx.Node:
    emit = Emitter(gm, norm.output)
    scale, _ = norm.vectors
    assert scale is not None
    stream, scale = (raised.get(node, node) for node in (norm.stream, scale))
    pair = emit(torch.ops.msc.rms_norm.default, stream, scale, norm.eps)
    value = emit(operator.getitem, pair, 0)
    replace(norm.output, value)
    return value
