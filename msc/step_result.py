"""What one step of all ranks gives, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from msc.ir.layout import BufferLayout, ParameterLayout
from msc.ir.mesh import Mesh
from msc.runtime.state import RankState


@dataclass
class StepResult:
    """One step of all ranks, put together.

    loss: of the global batch; grads, params: whole tensors by name (params after the optimizer's
    step, if there is an optimizer); state: what the next step starts from; grad_norm: the
    global norm of `grads`, which are those before clipping, if the optimizer clips or skips;
    buffers: those that the forward writes, as it has left them; skipped: how many steps up to this
    one changed no parameter; learning_rate: that of the step, if it has a schedule.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    state: list[RankState] = field(repr=False)
    grad_norm: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    skipped: Tensor | None = None
    learning_rate: Tensor | None = None


def put_together(
    mesh: Mesh,
    rank_graph: Callable[[int], fx.GraphModule],
    parameters: Mapping[str, ParameterLayout],
    buffers: Mapping[str, BufferLayout],
    state: list[RankState],
    outputs: Sequence[Mapping[str, Any]],
) -> StepResult:
    """Whole tensors from the outputs and the advanced states of all ranks.

    `params` lacks the parameters that no stage reads.
    """
    grads: dict[str, Tensor] = {}
    params: dict[str, Tensor] = {}
    held = [
        dict(zip(rank_graph(rank).meta["gradients"], output["gradients"], strict=True))
        for rank, output in enumerate(outputs)
    ]
    for name, layout in parameters.items():
        if not layout.stages:
            continue
        owners = layout.owners(mesh)
        params[name] = layout.whole([state[r].parameters[name] for r in owners], mesh).clone()
        if all(name in held[r] for r in owners):
            grads[name] = layout.whole([held[r][name] for r in owners], mesh)
    written = {
        name: state[layout.writer(mesh)].buffers[name].clone()
        for name, layout in buffers.items()
        if layout.stage is not None
    }
    told = {name: outputs[0].get(name) for name in ("grad_norm", "skipped", "learning_rate")}
    return StepResult(outputs[0]["loss"], grads, params, state, buffers=written, **told)
