"""Optimizers as data: what the rank graph's optimizer action runs with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from msc.ir.errors import PlanError


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, ICLR 2019), equal to `torch.optim.AdamW`.

    lr: step size; betas: decay rates of the moments; eps: added to the root of the second moment;
    weight_decay: decoupled, applied to every trainable parameter; max_norm: gradients whose global
    norm is larger are scaled down to it, as `torch.nn.utils.clip_grad_norm_` does; each parameter
    counts once on every mesh. None leaves them as they are.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    max_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise PlanError(f"AdamW: {name} is {value!r}; it is a number.")
        if not 0 <= self.lr < math.inf:
            raise PlanError(f"AdamW: lr is {self.lr!r}; it is finite and at least 0.")
        if not _are_rates(self.betas):
            raise PlanError(f"AdamW: betas are {self.betas!r}; they are two numbers in [0, 1).")
        if not self.eps >= 0:
            raise PlanError(f"AdamW: eps is {self.eps!r}; it must be at least 0.")
        if self.max_norm is not None and (
            not isinstance(self.max_norm, (int, float))
            or isinstance(self.max_norm, bool)
            or not self.max_norm > 0
        ):
            raise PlanError(
                f"AdamW: max_norm is {self.max_norm!r}; it is a number above 0, or None for no "
                "clipping."
            )
        if not self.weight_decay >= 0:
            raise PlanError(f"AdamW: weight_decay is {self.weight_decay!r}; it must be at least 0.")


def _are_rates(betas: Any) -> bool:
    numbers = isinstance(betas, (tuple, list)) and all(isinstance(b, (int, float)) for b in betas)
    return numbers and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
