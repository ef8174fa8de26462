"""LAMB on a rank's shards: the moments and norms first, and when these are summed, the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msc.runtime.gradients import Stepped, kept, ready, unless


def lamb_sums(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copies: Sequence[int],
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[Tensor, tuple[tuple[Tensor, ...], ...]]:
    """Moves the moments in place; squared norms of parameters and updates, each over its copies."""
    first, second = states
    squares: list[Tensor] = []
    updates: list[Tensor] = []
    for parameter, gradient, m, v, count in zip(
        parameters, gradients, first, second, copies, strict=True
    ):
        g = unless(skip, ready(gradient, m.dtype, scale))
        m.mul_(kept(skip, betas[0])).add_(g, alpha=1 - betas[0])
        v.mul_(kept(skip, betas[1])).addcmul_(g, g, value=1 - betas[1])
        update = _update(parameter, m, v, step, betas, eps, weight_decay)
        squares.append(_squared(parameter) / count)
        updates.append(_squared(update) / count)
    return torch.stack([*squares, *updates]), (tuple(first), tuple(second))


def lamb(
    parameters: Sequence[Tensor],
    sums: Tensor,
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    skip: Tensor | None = None,
) -> Stepped:
    """The step itself, in place, in the dtype of the moments.

    The updates are computed again from the moments: keeping them would take the memory of the
    parameters once more.
    """
    first, second = states
    of_parameters, of_updates = sums.sqrt().chunk(2)
    exist = (of_parameters > 0) & (of_updates > 0)
    ratios = torch.where(exist, of_parameters / of_updates, 1.0)
    for parameter, m, v, ratio in zip(parameters, first, second, ratios, strict=True):
        update = _update(parameter, m, v, step, betas, eps, weight_decay)
        moved = update * (ratio * lr)
        parameter.copy_(parameter.to(moved.dtype).sub(unless(skip, moved)))
    return tuple(parameters), (tuple(first), tuple(second))


def _update(
    parameter: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Tensor:
    """Adam's direction with bias correction, plus decay."""
    number = step.to(torch.float64)
    mean = m / (1 - torch.pow(betas[0], number))
    square = v / (1 - torch.pow(betas[1], number))
    update = mean / (square.sqrt() + eps)
    return torch.add(update, parameter.to(m.dtype), alpha=weight_decay)


def _squared(value: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(value, dtype=torch.float64)
    return norm.square()
