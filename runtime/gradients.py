"""What the optimizers' actions share: gradients made ready, and steps that may be skipped."""

from __future__ import annotations

import torch
from torch import Tensor

Stepped = tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]]
"""Parameters and states after a step."""


def ready(gradient: Tensor | None, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """A gradient as its parameter takes it: in `dtype`, contiguous, scaled. The given one stays."""
    assert gradient is not None  # callers leave out parameters without one
    # the fused kernels walk through memory: a gradient must lie in it like its parameter
    gradient = gradient.to(dtype).contiguous()
    return gradient if scale is None else gradient * scale.to(gradient.device, dtype)


def unless(skip: Tensor | None, value: Tensor) -> Tensor:
    """`value`, or zeros where `skip` is true: there a gradient that is NaN must not be felt."""
    return value if skip is None else value.masked_fill(skip.to(value.device), 0)


def kept(skip: Tensor | None, factor: float) -> float | Tensor:
    """What is kept of a moving average: `factor` of it, or all of it where `skip` is true."""
    if skip is None:
        return factor
    return torch.full_like(skip, factor, dtype=torch.float64).masked_fill(skip, 1.0)
