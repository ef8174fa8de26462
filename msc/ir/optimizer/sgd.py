"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from msc.ir import actions
from msc.ir.errors import PlanError
from msc.ir.optimizer.base import Action, Optimizer
from msc.ir.optimizer.learning_rate import LearningRate


@dataclass(frozen=True)
class SGD(Optimizer):
    """SGD with momentum, equal to `torch.optim.SGD`; without momentum it keeps no state.

    lr: step size; momentum: what is kept of the moving sum of gradients; dampening: what is taken
    off a gradient before it is added to it, except off the first; weight_decay: coupled,
    `weight_decay * parameter` is added to the gradient; nesterov: Nesterov momentum, which needs
    momentum and no dampening. For max_norm, skip_nonfinite and groups see `Optimizer`.
    """

    action: ClassVar[Action] = staticmethod(actions.sgd)

    lr: float | LearningRate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise PlanError(
                f"SGD: nesterov needs momentum above 0 and dampening 0; they are {self.momentum!r} "
                f"and {self.dampening!r}."
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.momentum, self.dampening, self.weight_decay, self.nesterov
