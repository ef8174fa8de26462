"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from msc.ir import actions
from msc.ir.optimizer.base import Action, Optimizer
from msc.ir.optimizer.learning_rate import LearningRate


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, ICLR 2015), equal to `torch.optim.Adam`.

    lr: step size; betas: decay rates of the moments; eps: added to the root of the second moment;
    weight_decay: coupled, `weight_decay * parameter` is added to the gradient. For max_norm,
    skip_nonfinite and groups see `Optimizer`.
    """

    action: ClassVar[Action] = staticmethod(actions.adam)
    decoupled: ClassVar[bool] = False

    lr: float | LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("first_moment", "second_moment")

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.betas, self.eps, self.weight_decay, self.decoupled


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, ICLR 2019), equal to `torch.optim.AdamW`.

    As `Adam`, but weight_decay is decoupled: the parameter decays beside the step.
    """

    decoupled: ClassVar[bool] = True

    weight_decay: float = 1e-2
