"""LAMB: Adam whose step is as long as the parameter, times the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from msc.ir import actions
from msc.ir.optimizer.base import Action, Optimizer
from msc.ir.optimizer.learning_rate import LearningRate


@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB (You et al., ICLR 2020, algorithm 2), with bias correction.

        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
        p = p - lr * norm(p) / norm(u) * u

    As in the paper, every parameter has its trust ratio norm(p) / norm(u), whether it decays or
    not, and the function of norm(p) is the identity; the ratio is 1 where a norm is 0. The norms
    are those of whole parameters on every mesh: one all-reduce gives all of them. For max_norm,
    skip_nonfinite and groups see `Optimizer`.
    """

    action: ClassVar[Action] = staticmethod(actions.lamb)
    sums: ClassVar[Action | None] = staticmethod(actions.lamb_sums)

    lr: float | LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("first_moment", "second_moment")

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.betas, self.eps, self.weight_decay
