"""Adam and AdamW on a rank's shards, with torch's fused kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from msc.ir.torch_private import fused_adam_
from msc.runtime.gradients import Stepped, ready

_COPIED_BYTES = 64 * 2**20  # of gradients that are cast or scaled at a time


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Stepped:
    """One AdamW step in place; `states` are the first and the second moments.

    Equal to `torch.optim.AdamW`; as there, a parameter without gradient keeps its value. The step
    is taken in the dtype of the moments; a parameter of a lower precision is rounded at its end.
    """
    hyper = (betas, eps, weight_decay)
    return _step(parameters, gradients, states, step, lr, hyper, scale, skip, decoupled=True)


def adam(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Stepped:
    """One Adam step in place, as `adamw` but with coupled decay: equal to `torch.optim.Adam`."""
    hyper = (betas, eps, weight_decay)
    return _step(parameters, gradients, states, step, lr, hyper, scale, skip, decoupled=False)


def _step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    lr: float | Tensor,
    hyper: tuple[tuple[float, float], float, float],
    scale: Tensor | None,
    skip: Tensor | None,
    *,
    decoupled: bool,
) -> Stepped:
    first, second = states
    betas, eps, weight_decay = hyper
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            groups[first[index].device, first[index].dtype].append(index)
    for (device, dtype), members in groups.items():
        for indices in _pieces(members, gradients, dtype, scale is not None):
            working = [parameters[index].to(dtype) for index in indices]
            fused_adam_(
                working,
                [ready(gradients[index], dtype, scale) for index in indices],
                [first[index] for index in indices],
                [second[index] for index in indices],
                # a copy that blocked would wait for the whole backward
                step.to(device, torch.float32, non_blocking=True),
                lr=_rate(lr),
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                decoupled=decoupled,
                skip=None if skip is None else skip.to(device, torch.float32),
            )
            for index, value in zip(indices, working, strict=True):
                if value is not parameters[index]:
                    parameters[index].copy_(value)
    return tuple(parameters), (tuple(first), tuple(second))


def _rate(lr: float | Tensor) -> float | Tensor:
    """What the kernel takes: a number, or on other devices than the CPU a float32 tensor."""
    if not isinstance(lr, Tensor):
        return lr
    return float(lr) if lr.device.type == "cpu" else lr.to(torch.float32)


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
