"""The single-device program of a model, trained with torch's own AdamW: what ranks are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import msc
from msc.verification import Reference


@dataclass(frozen=True)
class SingleRun:
    """Losses, the gradients of the first step, and the parameters after the last."""

    losses: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    evaluation: float


def train_single(
    model: nn.Module, batches: Sequence[Any], adamw: msc.AdamW, precision: str = "float64"
) -> SingleRun:
    """A step for each batch, and then the mean loss over all batches."""
    program = msc.compile(model, batches[0], precision=precision)
    reference = Reference(program, model, batches[0], {})
    values = {
        name: nn.Parameter(program.read_parameter(name).clone()) for name in program.parameters
    }
    optimizer = torch.optim.AdamW(
        list(values.values()),
        lr=adamw.lr,
        betas=adamw.betas,
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
    )
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
