"""Raise `aten.embedding` to `msc.embedding`.

    %e: f32[8,4,16] = aten.embedding(%w, %ids, 0)
        ->   %e: f32[8,4,16] = msc.embedding(%ids, %w, None, 0)

Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.errors import CaptureError
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.ir.values import where
from msc.passes.normalize.rewrite import Emitter, aten, calls, named_arguments, replace, shape_of


def raise_embedding(gm: fx.GraphModule) -> int:
    """Raise every embedding; returns their number.

    Raises `CaptureError` for scale_grad_by_freq, whose gradient depends on counts over the batch.
    """
    found = calls(gm, aten.embedding.default)
    for node in found:
        args = named_arguments(
            node, {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
        )
        if args["scale_grad_by_freq"]:
            raise CaptureError(
                f"The embedding at {where(node)} uses scale_grad_by_freq, which divides gradients "
                "by counts over the whole batch. Build it with scale_grad_by_freq=False."
            )
        extra = (None, args["padding_idx"]) if args["padding_idx"] >= 0 else ()
        new = Emitter(gm, node)(
            torch.ops.msc.embedding.default,
            args["indices"],
            args["weight"],
            *extra,
            shape=shape_of(node),
            like=node,
        )
        replace(node, new)
    return len(found)


@dataclass(frozen=True)
class RaiseEmbedding(GraphPass):
    """`raise_embedding` as a pass."""

    name: ClassVar[str] = "raise-embedding"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Raise every embedding."""
        return raise_embedding(gm)
