"""What all optimizers have in common: checks, clipping, skipped steps, groups of parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from msc.ir.errors import PlanError
from msc.ir.optimizer.group import ParameterGroup
from msc.ir.optimizer.learning_rate import LearningRate

Action = Callable[..., Any]
Names = Mapping[str, tuple[Sequence[str], int]]
"""Every parameter: all its names, tied aliases too, and its number of dims."""

_COMMON = ("max_norm", "skip_nonfinite", "groups")


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """The base of all optimizers.

    A subclass is a frozen dataclass with a field for each hyperparameter, `lr` among them. It sets
    `action`, and `sums` if its step needs sums over whole parameters; `state_names` and
    `arguments` may depend on its fields.

    max_norm: gradients whose global norm is larger are scaled down to it, as
    `torch.nn.utils.clip_grad_norm_` does; each parameter counts once on every mesh. None leaves
    them as they are.
    skip_nonfinite: a step whose gradients have a norm that is not finite changes no parameter, no
    state, and not the number of steps that learning rate and bias correction go by; it is counted.
    Buffers are as its forward left them. None: where there is `max_norm`, since the norm is known
    then.
    groups: parameters with other hyperparameters; the first group that matches one decides.
    """

    action: ClassVar[Action]
    sums: ClassVar[Action | None] = None

    max_norm: float | None = None
    skip_nonfinite: bool | None = None
    groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # equal optimizers have equal hashes
                object.__setattr__(self, field.name, value := tuple(value))
            holds, rule = _RULES[field.name]
            if not holds(value):
                raise PlanError(f"{self.name}: {field.name} is {value!r}; {rule}.")
        for group in self.groups:
            self._with(group)

    @property
    def name(self) -> str:
        """As the user writes it."""
        return type(self).__name__

    @property
    @abstractmethod
    def lr(self) -> float | LearningRate:
        """The step size, or how it changes from step to step."""

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """What is kept of each parameter between steps: tensors of its shape, zero at first."""

    @property
    @abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """The hyperparameters that the actions take besides the learning rate, in order."""

    @property
    def skips(self) -> bool:
        """Whether steps without a finite norm are skipped."""
        return self.max_norm is not None if self.skip_nonfinite is None else self.skip_nonfinite

    @property
    def needs_norm(self) -> bool:
        """Whether a step computes the global norm of the gradients."""
        return self.max_norm is not None or self.skips

    def grouped(self, parameters: Names) -> dict[str, Self]:
        """The hyperparameters of every parameter that is in a group.

        The first group that matches a parameter decides. `PlanError` for a pattern that matches
        nothing, or only parameters that groups before it have.
        """
        found: dict[str, Self] = {}
        for group in self.groups:
            chosen = self._with(group)
            for pattern in group.patterns:
                matched = [
                    n for n, (a, dims) in parameters.items() if group.matches(pattern, a, dims)
                ]
                left = [n for n in matched if found.get(n, chosen) == chosen]
                if not left:
                    why = "only parameters of groups before it" if matched else "no parameter"
                    raise PlanError(
                        f'{self.name}: {group} cannot be kept: "{pattern}" matches {why}. The '
                        f"parameters are {_listed(list(parameters))}."
                    )
                for name in left:
                    found[name] = chosen
        return found

    def plain(self, **options: Any) -> Self:
        """The hyperparameters alone, changed as `options` say."""
        return replace(self, max_norm=None, skip_nonfinite=None, groups=(), **options)

    def _with(self, group: ParameterGroup) -> Self:
        names = [field.name for field in fields(self) if field.name not in _COMMON]
        for option, _ in group.options:
            if option not in names:
                raise PlanError(
                    f"{self.name}: {group} sets '{option}'; the hyperparameters are "
                    f"{', '.join(names)}."
                )
        try:
            return self.plain(**dict(group.options))
        except PlanError as error:
            raise PlanError(f"In {group}: {error}") from error


def _listed(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value == value


def _is_rate(value: Any) -> bool:
    return isinstance(value, LearningRate) or (_is_number(value) and 0 <= value < math.inf)


def _is_at_least_0(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _are_betas(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _are_groups(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, ParameterGroup) for each in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_is_rate, "it is a finite number of at least 0, or an msc.LearningRate"),
    "betas": (_are_betas, "they are two numbers in [0, 1)"),
    "eps": (_is_at_least_0, "it is a finite number of at least 0"),
    "weight_decay": (_is_at_least_0, "it is a finite number of at least 0"),
    "momentum": (_is_at_least_0, "it is a finite number of at least 0"),
    "dampening": (
        lambda value: _is_number(value) and abs(value) < math.inf,
        "it is a finite number",
    ),
    "nesterov": (lambda value: isinstance(value, bool), "it is True or False"),
    "max_norm": (
        lambda value: value is None or (_is_number(value) and value > 0),
        "it is a number above 0, or None for no clipping",
    ),
    "skip_nonfinite": (
        lambda value: value is None or isinstance(value, bool),
        "it is True, False, or None for skipping where there is max_norm",
    ),
    "groups": (_are_groups, "it is a list of msc.ParameterGroup"),
}
"""What every field of an optimizer must be, and how the error says so."""
