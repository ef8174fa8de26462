"""LAMB on a rank's shards: the moments and norms first, and when these are summed, the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msc.runtime.gradients import Stepped, Taken, ready, unless

Summed = tuple[Tensor, tuple[tuple[Tensor, ...], ...]]
"""Squared norms and states after the moments moved."""


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
    kernel: Taken[Summed] | None = None,
) -> Summed:
    """Moves the moments in place; squared norms of parameters and updates, each over its copies.

    kernel: does so in place of torch's ops.
    """
    operands = (parameters, gradients, states, step, betas, eps, weight_decay, copies)
    if kernel is not None and (taken := kernel(*operands, scale, skip)) is not None:
        return taken
    first, second = states
    squares: list[Tensor] = []
    updates: list[Tensor] = []
    kept = [_kept(skip, beta) for beta in betas]
    for parameter, gradient, m, v, count in zip(
        parameters, gradients, first, second, copies, strict=True
    ):
        g = unless(skip, ready(gradient, m.dtype, scale))
        m.mul_(kept[0]).add_(g, alpha=1 - betas[0])
        v.mul_(kept[1]).addcmul_(g, g, value=1 - betas[1])
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
    kernel: Taken[Stepped] | None = None,
) -> Stepped:
    """The step itself, in place, in the dtype of the moments.

    The updates are computed again from the moments: keeping them would take the memory of the
    parameters once more. kernel: takes the step in place of torch's ops.
    """
    operands = (parameters, sums, states, step, lr, betas, eps, weight_decay)
    if kernel is not None and (taken := kernel(*operands, skip)) is not None:
        return taken
    first, second = states
    of_parameters, of_updates = sums.sqrt().chunk(2)
    exist = (of_parameters > 0) & (of_updates > 0)
    lengths = torch.where(exist, of_parameters / of_updates, 1.0) * lr
    for parameter, m, v, length in zip(parameters, first, second, lengths, strict=True):
        moved = _update(parameter, m, v, step, betas, eps, weight_decay).mul_(length)
        value = parameter.to(m.dtype).sub_(unless(skip, moved))
        if value is not parameter:
            parameter.copy_(value)
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
    """Adam's direction with bias correction, plus decay; a new tensor."""
    number = step.to(torch.float64)
    correction = 1 - torch.pow(betas[0], number)
    root = (v / (1 - torch.pow(betas[1], number))).sqrt_().add_(eps)
    update: Tensor = torch.div(m, root.mul_(correction), out=root)
    return update.add_(parameter.to(m.dtype), alpha=weight_decay)


def _kept(skip: Tensor | None, beta: float) -> float | Tensor:
    """What is kept of a moment: `beta` of it, or all of it where `skip` is true."""
    if skip is None:
        return beta
    return torch.full_like(skip, beta, dtype=torch.float64).masked_fill(skip, 1.0)


def _squared(value: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(value, dtype=torch.float64)
    return norm.square()
