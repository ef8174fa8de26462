"""Pipeline schedules: the order of the forwards and backwards of a stage's micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msc.ir.errors import PlanError


@dataclass(frozen=True)
class Step:
    """One forward or backward of one micro-batch on one chunk."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}"


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Step]:
    """All forwards, then all backwards (Huang et al., NeurIPS 2019)."""
    forwards = [Step("forward", i, stage) for i in range(num_micro_batches)]
    return forwards + [Step("backward", i, stage) for i in range(num_micro_batches)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Step]:
    """Warm up, then alternate, so that a stage holds at most `num_stages - stage` activations.

    PipeDream-Flush (Narayanan et al., ICML 2021).
    """
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    steps = [Step("forward", i, stage) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        steps += [Step("forward", warm_up + i, stage), Step("backward", i, stage)]
    rest = range(num_micro_batches - warm_up, num_micro_batches)
    return steps + [Step("backward", i, stage) for i in rest]


SCHEDULES: dict[str, Callable[[int, int, int], list[Step]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def schedule_of(name: str) -> Callable[[int, int, int], list[Step]]:
    """The schedule called `name`; `PlanError` lists the known ones."""
    if name not in SCHEDULES:
        raise PlanError(f"Schedule '{name}' is unknown. The schedules are {', '.join(SCHEDULES)}.")
    return SCHEDULES[name]
