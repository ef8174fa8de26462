"""LAMB as the paper writes it, tensor by tensor: what the program's is held to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class PlainLAMB:
    """You et al., ICLR 2020, algorithm 2, with bias correction; the ratio is 1 at a norm of 0."""

    def __init__(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = 0

    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """One step in place; what has no gradient stays."""
        self.steps += 1
        for name, gradient in gradients.items():
            x = parameters[name]
            m, v = self.moments.get(name, (torch.zeros_like(x), torch.zeros_like(x)))
            m = self.betas[0] * m + (1 - self.betas[0]) * gradient
            v = self.betas[1] * v + (1 - self.betas[1]) * gradient**2
            self.moments[name] = m, v
            mean = m / (1 - self.betas[0] ** self.steps)
            square = v / (1 - self.betas[1] ** self.steps)
            update = mean / (square.sqrt() + self.eps) + self.weight_decay * x
            ratio = float(x.norm() / update.norm()) if x.norm() > 0 and update.norm() > 0 else 1.0
            x -= self.lr * ratio * update
