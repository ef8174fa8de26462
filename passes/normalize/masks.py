"""Recognize attention masks that are constants: all-true, causal, causal with a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskPattern:
    """Query i sees key j iff j <= i (if causal) and i - window < j (if window > 0)."""

    causal: bool = False
    window: int = 0

    def intersect(self, other: MaskPattern) -> MaskPattern:
        """What both of them show."""
        windows = [each.window for each in (self, other) if each.window]
        return MaskPattern(self.causal or other.causal, min(windows, default=0))


def recognize(mask: Tensor) -> MaskPattern | None:
    """The pattern of a mask `[.., s, t]`, bool (True is visible) or added to the scores.

    None if it has no pattern, or another one in another sample or head.
    """
    if mask.dim() < 2 or 0 in mask.shape:
        return None
    flat = mask.expand(mask.shape).reshape(-1, *mask.shape[-2:])
    if flat.shape[0] > 1 and not bool((flat[1:] == flat[:1]).all()):
        return None
    visible = _visible(flat[0])
    if visible is None:
        return None
    if bool(visible.all()):
        return MaskPattern()
    s, t = visible.shape
    causal = torch.ones(s, t, dtype=torch.bool).tril_()
    if torch.equal(visible, causal):
        return MaskPattern(causal=True)
    distance = torch.arange(s).unsqueeze(1) - torch.arange(t)
    window = int(distance.masked_fill(~visible, -1).max()) + 1
    if window > 0 and torch.equal(visible, causal & (distance < window)):
        return MaskPattern(causal=True, window=window)
    return None


def _visible(mask: Tensor) -> Tensor | None:
    """A bool mask that says the same; None if a float mask holds other numbers than 0 and -inf."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    # Models write -inf as the smallest number of the dtype; its exponential is 0 as well.
    hidden = mask <= torch.finfo(mask.dtype).min
    visible = mask == 0
    return visible if bool((visible | hidden).all()) else None
