"""Adam and AdamW on a rank's shards, with torch's fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msc.ir.torch_private import fused_adam_
from msc.runtime.gradients import Stepped, Taken, kernel_flag, kernel_rate, step_in_pieces


def adam(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    states: Sequence[Sequence[Tensor]],
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
    kernel: Taken[Stepped] | None = None,
) -> Stepped:
    """One step in place; `states` are the first and the second moments.

    Equal to `torch.optim.AdamW` where the decay is decoupled, or else to `torch.optim.Adam`; as
    there, a parameter without gradient keeps its value. The step is taken in the dtype of the
    moments; a parameter of a lower precision is rounded at its end. kernel: takes the step in place
    of torch's.
    """
    operands = (parameters, gradients, states, step, lr, betas, eps, weight_decay, decoupled)
    if kernel is not None and (taken := kernel(*operands, scale, skip)) is not None:
        return taken
    first, second = states

    def torch_kernel(indices: list[int], values: list[Tensor], moved: list[Tensor]) -> None:
        device = values[0].device
        fused_adam_(
            values,
            moved,
            [first[index] for index in indices],
            [second[index] for index in indices],
            # a copy that blocked would wait for the whole backward
            step.to(device, torch.float32, non_blocking=True),
            lr=kernel_rate(lr),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            skip=kernel_flag(skip, device),
        )

    step_in_pieces(torch_kernel, parameters, gradients, first, scale)
    return tuple(parameters), (tuple(first), tuple(second))
