"""Two checkpoints compared, tensor by tensor and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.runtime.checkpoint.saved_state import SavedState


@dataclass(frozen=True)
class Difference:
    """How a tensor differs between two checkpoints; "" if not at all."""

    name: str
    what: str


def differences(one: SavedState, other: SavedState) -> Iterator[Difference]:
    """Every tensor of both, compared bit for bit."""
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            yield Difference(name, f"only in the {'second' if name in other else 'first'}")
        elif one.descriptions[name] != other.descriptions[name]:
            a, b = one.descriptions[name], other.descriptions[name]
            yield Difference(name, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        else:
            yield Difference(name, _difference(one[name], other[name]))


def _difference(a: Tensor, b: Tensor) -> str:
    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return ""
    count = int((a != b).sum())
    gap = (a.double() - b.double()).abs().max()
    return f"{count} of {a.numel()} elements, by {float(gap):.3g} at most"
