"""SGD with momentum on a rank's shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msc.runtime.gradients import Stepped, kept, ready, unless


def sgd(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Stepped:
    """One step in place; `states` has the moving sums of gradients, if there is momentum.

    Equal to `torch.optim.SGD`; as there, a parameter without gradient keeps its value. The step is
    taken in the dtype of the state, or of the parameter where there is none.
    """
    sums = states[0] if states else [None] * len(parameters)
    share = _share(step, dampening)
    for parameter, gradient, total in zip(parameters, gradients, sums, strict=True):
        if gradient is None:
            continue
        dtype = parameter.dtype if total is None else total.dtype
        value = parameter.to(dtype)
        moved = ready(gradient, dtype, scale)
        if weight_decay:
            moved = moved.add(value, alpha=weight_decay)
        moved = unless(skip, moved)
        if total is not None:
            total.mul_(kept(skip, momentum)).add_(moved * share)
            moved = moved.add(total, alpha=momentum) if nesterov else total
        parameter.copy_(value.sub(unless(skip, moved * lr)))
    return tuple(parameters), tuple(tuple(state) for state in states)


def _share(step: Tensor, dampening: float) -> float | Tensor:
    """What of a gradient is added to the moving sum; torch takes the first one as it is."""
    if not dampening:
        return 1.0
    return torch.full_like(step, 1 - dampening, dtype=torch.float64).masked_fill(step <= 1, 1.0)
