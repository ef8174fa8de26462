"""What one step of all ranks gives, put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from msc.runtime.state import RankState


@dataclass
class StepResult:
    """One step of all ranks, put together.

    loss: of the global batch; grads, params: whole tensors by name (params after the optimizer's
    step, if there is an optimizer); state: what the next step starts from; grad_norm: the
    global norm of `grads`, which are those before clipping, if the optimizer clips; buffers: those
    that the forward writes, as it has left them.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    state: list[RankState] = field(repr=False)
    grad_norm: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
