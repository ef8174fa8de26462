"""AdamW on a rank's shards, with torch's fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from msc.ir.torch_private import fused_adamw_


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    step: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decays: Sequence[float],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One AdamW step in place; returns (parameters, first_moments, second_moments).

    Equal to `torch.optim.AdamW`; as there, a parameter without gradient keeps its value. The step
    is taken in the dtype of the moments; a parameter of a lower precision is rounded at its end.
    """
    groups: dict[tuple[float, torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            moment = first_moments[index]
            groups[weight_decays[index], moment.device, moment.dtype].append(index)
    for (weight_decay, device, dtype), indices in groups.items():
        working = [parameters[index].to(dtype) for index in indices]
        fused_adamw_(
            working,
            [_cast(gradients[index], dtype) for index in indices],
            [first_moments[index] for index in indices],
            [second_moments[index] for index in indices],
            step.to(device, torch.float32),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        for index, value in zip(indices, working, strict=True):
            if value is not parameters[index]:
                parameters[index].copy_(value)
    return tuple(parameters), tuple(first_moments), tuple(second_moments)


def _cast(gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert gradient is not None  # the indices are those of gradients that exist
    # the kernel walks through memory: a gradient must lie in it like its parameter
    return gradient.to(dtype).contiguous()
