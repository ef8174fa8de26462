"""Random calls of every op in the rule table: `SAMPLERS[op](Draw(data), op)` is a `Call`."""

from __future__ import annotations

from msc.testing.samples import dims, indexing, layers, losses, places, pointwise, reductions
from msc.testing.samples.draw import SAMPLERS, Draw

__all__ = [
    "SAMPLERS",
    "Draw",
    "dims",
    "indexing",
    "layers",
    "losses",
    "places",
    "pointwise",
    "reductions",
]
