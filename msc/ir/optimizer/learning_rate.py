"""Learning-rate schedules as data: phases, one after the other, evaluated on the step tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msc.ir.errors import PlanError

LINEAR, COSINE = "linear", "cosine"


class Phase(NamedTuple):
    """`steps` steps over which the rate goes from `first`, where it stood before, to `last`."""

    steps: int
    first: float
    last: float
    shape: str = LINEAR


@dataclass(frozen=True)
class LearningRate:
    """A learning rate that changes from step to step; make one with `cosine`, `wsd` and so on.

    Steps count from 1, and are those that changed the parameters. Warm-up goes up linearly, so that
    step t of it has lr * t / warmup, and the last of its steps has lr; a decay ends with `final` in
    step `steps`, and what comes later keeps it.

    phases: in order; held: the rate after all of them.
    """

    phases: tuple[Phase, ...]
    held: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(Phase(*phase) for phase in self.phases))
        for phase in self.phases:
            if not isinstance(phase.steps, int) or isinstance(phase.steps, bool) or phase.steps < 1:
                raise PlanError(f"LearningRate: a phase has {phase.steps!r} steps, not 1 or more.")
            if phase.shape not in (LINEAR, COSINE):
                raise PlanError(
                    f"LearningRate: a phase has the shape {phase.shape!r}; the shapes are "
                    f"'{LINEAR}' and '{COSINE}'."
                )
        for rate in (self.held, *(r for p in self.phases for r in (p.first, p.last))):
            _require_rate("a rate", rate)

    @classmethod
    def constant(cls, lr: float, *, warmup: int = 0) -> LearningRate:
        """Warm-up, then `lr`."""
        return cls._of(_warmup(lr, warmup), lr)

    @classmethod
    def linear(cls, lr: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> LearningRate:
        """Warm-up, then straight down to `final` in step `steps`."""
        return cls._of([*_warmup(lr, warmup), _decay(lr, final, steps, warmup, LINEAR)], final)

    @classmethod
    def cosine(cls, lr: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> LearningRate:
        """Warm-up, then down to `final` in step `steps` along half a cosine (Loshchilov, 2017)."""
        return cls._of([*_warmup(lr, warmup), _decay(lr, final, steps, warmup, COSINE)], final)

    @classmethod
    def wsd(
        cls,
        lr: float,
        *,
        steps: int,
        decay: int,
        warmup: int = 0,
        final: float = 0.0,
        shape: str = LINEAR,
    ) -> LearningRate:
        """Warm-up, stable at `lr`, and down to `final` over the last `decay` of `steps` steps.

        Hu et al., MiniCPM (2024), section 4; `shape` of the decay: "linear" or "cosine".
        """
        phases = _warmup(lr, warmup)
        _require_count("decay", decay, 1)
        down = _decay(lr, final, steps, steps - decay, shape)
        stable = steps - decay - warmup
        if stable < 0:
            raise PlanError(
                f"LearningRate: warmup={warmup} and decay={decay} are more than steps={steps}."
            )
        if stable:
            phases.append(Phase(stable, lr, lr))
        return cls._of([*phases, down], final)

    @classmethod
    def _of(cls, phases: Sequence[Phase], held: float) -> LearningRate:
        return cls(tuple(phases), held)

    def at(self, step: Tensor | int) -> Tensor:
        """The rate of step `step`, a number or 0-dim tensor; 0-dim float64, on its device."""
        position = torch.as_tensor(step).to(torch.float64)
        rate = torch.full_like(position, self.held)
        end = sum(phase.steps for phase in self.phases)
        for steps, first, last, shape in reversed(self.phases):
            part = (position - (end - steps)) / steps
            moved = part if shape == LINEAR else (1 - torch.cos(math.pi * part)) / 2
            rate = torch.where(position <= end, first + (last - first) * moved, rate)
            end -= steps
        return rate


def _warmup(lr: float, warmup: int) -> list[Phase]:
    _require_rate("lr", lr)
    _require_count("warmup", warmup, 0)
    return [Phase(warmup, 0.0, lr)] if warmup else []


def _decay(lr: float, final: float, steps: int, before: int, shape: str) -> Phase:
    _require_rate("final", final)
    _require_count("steps", steps, 1)
    if steps <= before:
        raise PlanError(
            f"LearningRate: steps={steps} leaves nothing after the first {before} steps; it counts "
            "all steps, warm-up too."
        )
    return Phase(steps - before, lr, final, shape)


def _require_rate(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise PlanError(f"LearningRate: {name} is {value!r}; it is a finite number of at least 0.")


def _require_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"LearningRate: {name} is {value!r}; it is a whole number of at least {least}."
        )
