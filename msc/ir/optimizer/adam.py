"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from msc.ir import actions
from msc.ir.optimizer.base import Action, Optimizer
from msc.ir.optimizer.learning_rate import LearningRate

_MOMENTS = ("first_moment", "second_moment")


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, ICLR 2019), equal to `torch.optim.AdamW`.

    lr: step size; betas: decay rates of the moments; eps: added to the root of the second moment;
    weight_decay: decoupled. For max_norm, skip_nonfinite and groups see `Optimizer`.
    """

    action: ClassVar[Action] = staticmethod(actions.adamw)

    lr: float | LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    @property
    def state_names(self) -> tuple[str, ...]:
        return _MOMENTS

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.betas, self.eps, self.weight_decay


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, ICLR 2015), equal to `torch.optim.Adam`.

    As `AdamW`, but weight_decay is coupled: `weight_decay * parameter` is added to the gradient.
    """

    action: ClassVar[Action] = staticmethod(actions.adam)

    lr: float | LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        return _MOMENTS

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.betas, self.eps, self.weight_decay
