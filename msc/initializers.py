"""What a user may say of a parameter's initial values: `init={"*.weight": msc.Normal(0.02)}`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Values = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""`values(shape, dtype)` computes a whole tensor; for small ones, such as buffers."""


@dataclass(frozen=True)
class Normal:
    """Normal numbers of standard deviation `std`."""

    std: float
    mean: float = 0.0

    def fill(self, tensor: Tensor) -> None:
        """Fill a tensor."""
        tensor.normal_(self.mean, self.std)


@dataclass(frozen=True)
class Uniform:
    """Uniform numbers in [low, high)."""

    low: float
    high: float

    def fill(self, tensor: Tensor) -> None:
        """Fill a tensor."""
        tensor.uniform_(self.low, self.high)


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float

    def fill(self, tensor: Tensor) -> None:
        """Fill a tensor."""
        tensor.fill_(self.value)


@dataclass(frozen=True)
class Zeros(Constant):
    """Zero everywhere."""

    value: float = 0.0


@dataclass(frozen=True)
class Ones(Constant):
    """One everywhere."""

    value: float = 1.0


Initializer = Normal | Uniform | Constant
