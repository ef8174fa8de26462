"""The single-device program of a model, trained with torch's own optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import msc
from msc.ir.optimizer import Optimizer
from msc.verification import Reference

TORCH: dict[type[Optimizer], Any] = {
    msc.AdamW: torch.optim.AdamW,
    msc.Adam: torch.optim.Adam,
    msc.SGD: torch.optim.SGD,
}


def torch_optimizer(
    spec: Optimizer,
    values: Mapping[str, nn.Parameter],
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> torch.optim.Optimizer:
    """Torch's optimizer with the hyperparameters of ours, a param group for each parameter."""
    common = {f.name for f in fields(Optimizer)}
    names = aliases or {name: (name,) for name in values}
    grouped = spec.grouped({name: (names[name], value.dim()) for name, value in values.items()})
    groups = []
    for name, value in values.items():
        own = grouped.get(name, spec)
        options = {f.name: getattr(own, f.name) for f in fields(own) if f.name not in common}
        groups.append({"params": [value], **options})
    found: torch.optim.Optimizer = TORCH[type(spec)](groups)
    return found


@dataclass(frozen=True)
class SingleRun:
    """Losses, the gradients of the first step, and the parameters after the last."""

    losses: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    evaluation: float


def train_single(
    model: nn.Module, batches: Sequence[Any], spec: Optimizer, precision: str = "float64"
) -> SingleRun:
    """A step for each batch, and then the mean loss over all batches."""
    program = msc.compile(model, batches[0], precision=precision)
    reference = Reference(program, model, batches[0], {})
    values = {
        name: nn.Parameter(program.read_parameter(name).clone()) for name in program.parameters
    }
    optimizer = torch_optimizer(spec, values)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for batch in batches:
        loss, grads = reference.run(batch, values)
        losses.append(float(loss))
        first = first or {name: grad.clone() for name, grad in grads.items()}
        for name, value in values.items():
            value.grad = grads.get(name)
        optimizer.step()
    scores = [float(reference.run(batch, values)[0]) for batch in batches]
    params = {name: value.detach().clone() for name, value in values.items()}
    return SingleRun(losses, first, params, sum(scores) / len(scores))
