"""Adam, AdamW and LAMB: the actions of `msc.ir.actions`, all tensors of one in one launch.

Gradients that are scaled, or of another dtype than the moments, need no copy: the kernels read them
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, is_dense, name_of
from msc.codegen.kernels import optimizer as kernels
from msc.codegen.kernels.description import Target
from msc.codegen.kernels.launch import KernelError
from msc.codegen.kernels.optimizer import PIECE, Moments
from msc.ir.errors import PlanError
from msc.ir.torch_private import FakeTensor

Tensors = Sequence[Tensor]
States = Sequence[Tensors]


def adam(
    target: Target,
    parameters: Tensors,
    gradients: Sequence[Tensor | None],
    states: States,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Plan:
    """A step in place; what has no gradient stays."""
    moving = _existing(gradients)
    if not moving:
        raise PlanError("adam: no parameter has a gradient")
    moved = [parameters[index] for index in moving]
    table = _Table([parameter.numel() for parameter in moved])
    moments = _moments(
        target, table, moved, list(moving.values()), states, (betas[0], betas[1]), eps,
        weight_decay, decoupled,
    )  # fmt: skip
    kernel = kernels.emit_adam(moments)

    def run(
        parameters: Tensors,
        gradients: Sequence[Tensor | None],
        states: States,
        step: Tensor,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> tuple[Launches, Any]:
        moving = _existing(gradients)
        first, second = ([state[index] for index in moving] for state in states)
        moved = [parameters[index] for index in moving]
        given = [dense(gradient) for gradient in moving.values()]
        values = table.of(parameters=moved, gradients=given, firsts=first, seconds=second)
        values["scalars"] = _scalars(moved[0].device, step, lr, moments.betas, scale, skip)
        return [(kernel, values)], _stepped(parameters, states)

    return Plan((kernel,), run)


def lamb_sums(
    target: Target,
    parameters: Tensors,
    gradients: Tensors,
    states: States,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copies: Sequence[int],
    scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Plan:
    """The moments, and the squared norms over their copies, added up in a fixed order."""
    if not parameters:
        raise PlanError("lamb_sums: there are no parameters")
    table = _Table([parameter.numel() for parameter in parameters])
    moments = _moments(
        target, table, parameters, gradients, states, (betas[0], betas[1]), eps, weight_decay, True
    )
    moving, norming = kernels.emit_lamb_moments(moments), kernels.emit_lamb_norms(moments)

    def run(
        parameters: Tensors,
        gradients: Tensors,
        states: States,
        step: Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        copies: Sequence[int],
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> tuple[Launches, Any]:
        device = parameters[0].device
        first, second = states
        given = [dense(gradient) for gradient in gradients]
        values = table.of(parameters=parameters, gradients=given, firsts=first, seconds=second)
        squares = torch.empty((table.pieces, 2), dtype=torch.float32, device=device)
        values["scalars"] = _scalars(device, step, 0.0, moments.betas, scale, skip)
        norms = torch.empty((2, len(parameters)), dtype=torch.float64, device=device)
        sums = {"squares": squares, "ends": table.on(parameters[0]).ends, "norms": norms}
        return [(moving, values | {"squares": squares}), (norming, sums)], (norms, states)

    def finish(results: Any) -> Any:
        norms, states = results
        over = torch.tensor(copies, dtype=torch.float64, device=norms.device)
        return (norms / over).view(-1), tuple(map(tuple, states))

    return Plan((moving, norming), run, finish=finish)


def lamb(
    target: Target,
    parameters: Tensors,
    sums: Tensor,
    states: States,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    skip: Tensor | None = None,
) -> Plan:
    """The step itself, in place."""
    if not parameters:
        raise PlanError("lamb: there are no parameters")
    table = _Table([parameter.numel() for parameter in parameters])
    moments = _moments(
        target, table, parameters, parameters, states, (betas[0], betas[1]), eps, weight_decay, True
    )
    kernel = kernels.emit_lamb_step(moments)

    def run(
        parameters: Tensors,
        sums: Tensor,
        states: States,
        step: Tensor,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        skip: Tensor | None = None,
    ) -> tuple[Launches, Any]:
        first, second = states
        values = table.of(parameters=parameters, firsts=first, seconds=second)
        values["scalars"] = _scalars(parameters[0].device, step, lr, moments.betas, None, skip)
        values |= {"norms": dense(sums), "count": len(parameters)}
        return [(kernel, values)], _stepped(parameters, states)

    return Plan((kernel,), run)


def _existing(gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """The gradients that there are, by the index of their parameter."""
    return {index: each for index, each in enumerate(gradients) if each is not None}


@dataclass(frozen=True)
class _Pieces:
    """Which piece of which tensor each program has, and where each tensor's pieces end."""

    lengths: Tensor
    tensors: Tensor
    starts: Tensor
    ends: Tensor


class _Table:
    """The tables of a launch over tensors of given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        counts = [-(-length // PIECE) for length in lengths]
        self.pieces = sum(counts)
        self._columns = (
            (list(lengths), torch.int64),
            ([index for index, count in enumerate(counts) for _ in range(count)], torch.int32),
            ([PIECE * piece for count in counts for piece in range(count)], torch.int64),
            ([sum(counts[:index]) for index in range(len(counts) + 1)], torch.int32),
        )
        self._known: dict[torch.device, _Pieces] = {}

    def on(self, like: Tensor) -> _Pieces:
        """The tables on the device of a tensor, made once."""
        device = like.device
        if device in self._known:
            return self._known[device]
        made = (torch.tensor(each, dtype=dtype, device=device) for each, dtype in self._columns)
        pieces = _Pieces(*made)
        if not isinstance(pieces.ends, FakeTensor):
            self._known[device] = pieces
        return pieces

    def of(self, **tensors: Tensors) -> dict[str, Any]:
        """The arguments that say where everything lies; `KernelError` for what has gaps."""
        pieces = self.on(next(iter(tensors.values()))[0])
        known = {"lengths": pieces.lengths, "tensors": pieces.tensors, "starts": pieces.starts}
        return known | {name: _addresses(name, each) for name, each in tensors.items()}


def _addresses(name: str, tensors: Tensors) -> Tensor:
    for tensor in tensors:
        if not is_dense(tensor):
            raise KernelError(
                f"of the {name} one is not contiguous at a multiple of 16 bytes, of shape "
                f"{tuple(tensor.shape)}, and the step is taken in place"
            )
    predicted = isinstance(tensors[0], FakeTensor)
    found = [0 if predicted else tensor.data_ptr() for tensor in tensors]
    return torch.tensor(found, dtype=torch.int64, device=tensors[0].device)


def _moments(
    target: Target,
    table: _Table,
    parameters: Tensors,
    gradients: Tensors,
    states: States,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> Moments:
    kept = sorted({name_of(value.dtype) for state in states for value in state})
    if kept != ["float32"]:
        raise PlanError(f"optimizer: kernels keep moments in float32, not {' and '.join(kept)}")
    dtypes = [{name_of(value.dtype) for value in each} for each in (parameters, gradients)]
    if any(len(found) > 1 for found in dtypes):
        raise PlanError("optimizer: kernels take parameters, and gradients, of one dtype each")
    ((dtype,), (gradient_dtype,)) = dtypes
    count, pieces = len(parameters), table.pieces
    if not pieces:
        raise PlanError("optimizer: all parameters are empty")
    own = (betas, eps, weight_decay, decoupled)
    return Moments(count, pieces, dtype, gradient_dtype, target, *own)


def _scalars(
    device: torch.device,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    scale: Tensor | None,
    skip: Tensor | None,
) -> Tensor:
    """What changes from step to step; on the device, without waiting for it."""
    number = step.to(device, torch.float64, non_blocking=True)

    def scalar(value: float | Tensor | None, missing: float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(device, torch.float64, non_blocking=True).reshape(())
        return number.new_full((), missing if value is None else value)

    corrections = [(1 - torch.pow(beta, number)).reciprocal().reshape(()) for beta in betas]
    values = [scalar(lr, 0.0), *corrections, scalar(scale, 1.0), scalar(skip, 0.0)]
    return torch.stack(values).to(torch.float32)


def _stepped(parameters: Tensors, states: States) -> Any:
    return tuple(parameters), tuple(map(tuple, states))
