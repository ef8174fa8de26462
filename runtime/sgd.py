"""SGD with momentum on a rank's shards, with torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msc.ir.ops.library import HALF_DTYPES
from msc.ir.torch_private import fused_sgd_
from msc.runtime.gradients import Stepped, kernel_flag, kernel_rate, step_in_pieces, unless


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
    taken in the dtype of the state, or of the parameter where there is none; half types are
    computed in float32 and rounded once.
    """

    def kernel(indices: list[int], values: list[Tensor], moved: list[Tensor]) -> None:
        sums = [states[0][index] for index in indices] if states else []
        if sums and dampening:
            share = _missing_share(step, momentum, dampening)
            for total, value, gradient in zip(sums, values, moved, strict=True):
                whole = gradient.add(value, alpha=weight_decay)
                total.add_(unless(skip, whole) * share)
        # the CPU kernel of torch 2.13 leaves all but the last elements of half types as they are
        wide = [_wide(tensors) for tensors in (values, moved, sums)]
        fused_sgd_(
            *wide,
            lr=kernel_rate(lr),
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            skip=kernel_flag(skip, values[0].device),
        )
        for tensors, computed in ((values, wide[0]), (sums, wide[2])):
            for tensor, result in zip(tensors, computed, strict=True):
                if result is not tensor:
                    tensor.copy_(result)

    step_in_pieces(kernel, parameters, gradients, states[0] if states else parameters, scale)
    return tuple(parameters), tuple(tuple(state) for state in states)


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, those of half types as float32."""
    return [t.float() if t.dtype in HALF_DTYPES else t for t in tensors]


def _missing_share(step: Tensor, momentum: float, dampening: float) -> Tensor:
    """What of the first gradient the sum must hold before a damped step: torch damps later ones.

    momentum * share + (1 - dampening) = 1 in step 1; no share later. Whether it is step 1 is known
    to the tensor alone where steps may be skipped.
    """
    share = torch.zeros_like(step, dtype=torch.float64)
    return share.masked_fill(step <= 1, dampening / momentum)
