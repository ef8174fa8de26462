"""AdamW on a rank's shards, with torch's fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from msc.ir.torch_private import fused_adamw_

_COPIED_BYTES = 64 * 2**20  # of gradients that are cast or scaled at a time


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
    scale: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One AdamW step in place; returns (parameters, first_moments, second_moments).

    Equal to `torch.optim.AdamW`; as there, a parameter without gradient keeps its value. The step
    is taken in the dtype of the moments; a parameter of a lower precision is rounded at its end.
    `scale` is multiplied with the gradients, which stay as they are.
    """
    groups: dict[tuple[float, torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            moment = first_moments[index]
            groups[weight_decays[index], moment.device, moment.dtype].append(index)
    for (weight_decay, device, dtype), members in groups.items():
        for indices in _pieces(members, gradients, dtype, scale is not None):
            working = [parameters[index].to(dtype) for index in indices]
            fused_adamw_(
                working,
                [_ready(gradients[index], dtype, scale) for index in indices],
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


def _pieces(
    indices: list[int], gradients: Sequence[Tensor | None], dtype: torch.dtype, scaled: bool
) -> Iterator[list[int]]:
    """Runs of indices whose gradients, where they must be copied, take a bounded memory."""
    piece: list[int] = []
    filled = 0
    for index in indices:
        gradient = gradients[index]
        assert gradient is not None  # the indices are those of gradients that exist
        copies = scaled or gradient.dtype != dtype or not gradient.is_contiguous()
        copied = gradient.numel() * dtype.itemsize if copies else 0
        if piece and filled + copied > _COPIED_BYTES:
            yield piece
            piece, filled = [], 0
        piece.append(index)
        filled += copied
    yield piece


def _ready(gradient: Tensor | None, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    assert gradient is not None  # the indices are those of gradients that exist
    # the kernel walks through memory: a gradient must lie in it like its parameter
    gradient = gradient.to(dtype).contiguous()
    return gradient if scale is None else gradient * scale.to(gradient.device, dtype)
