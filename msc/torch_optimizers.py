"""Optimizers of torch, as part of a program: their classes, param groups and flags read as data."""

from __future__ import annotations

from collections.abc import Mapping
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from msc.ir.errors import PlanError
from msc.ir.optimizer import SGD, Adam, AdamW, Optimizer, ParameterGroup
from msc.ir.torch_private import has_step_hooks

_ADAM = ("lr", "betas", "eps", "weight_decay")
_KNOWN: dict[type[torch.optim.Optimizer], tuple[type[Optimizer], tuple[str, ...]]] = {
    torch.optim.AdamW: (AdamW, _ADAM),
    torch.optim.Adam: (Adam, _ADAM),
    torch.optim.SGD: (SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
}
"""Of torch's class: ours, and the hyperparameters that both have."""

_REFUSED = ("amsgrad", "maximize", "differentiable", "capturable")
_HOW = ("foreach", "fused")  # how torch computes the step, which changes nothing of it


def as_optimizer(optimizer: Any, model: nn.Module) -> Optimizer | None:
    """An optimizer as the compiler knows it; torch's own are read, and left as they are.

    A torch optimizer must hold every parameter of `model` that requires a gradient and no others:
    torch would leave out what it does not hold, a program trains all.

    Raises `PlanError` for another class, flags that change the update in a way that programs do not
    have, an optimizer that has stepped already or has a scheduler or hooks, and parameters that are
    not the model's.
    """
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"optimizer is a {type(optimizer).__name__}; pass msc.AdamW(...), msc.Adam, msc.SGD or "
            "msc.LAMB, an optimizer of torch, or None for loss and gradients only."
        )
    return _read(optimizer, model)


def _read(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    kind = type(optimizer)
    title = f"torch.optim.{kind.__name__}"
    if kind not in _KNOWN:
        known = ", ".join(each.__name__ for each in _KNOWN)
        raise PlanError(
            f"optimizer is a {kind.__module__}.{kind.__name__}, whose update is not known. Of "
            f"torch's these are: {known}. Use one of them, or msc.LAMB."
        )
    if optimizer.state:
        raise PlanError(
            f"The {title} has stepped already: it holds state of {len(optimizer.state)} "
            "parameters, which a program does not take over. Pass a new one."
        )
    if has_step_hooks(optimizer):
        raise PlanError(
            f"The {title} has hooks around step(), which no program calls. Remove them."
        )
    names = _names(optimizer, model, title)
    ours, hyperparameters = _KNOWN[kind]
    options: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        where = f"{title}, param group {index}"
        _refuse_flags(group, where)
        if ours is Adam and group["decoupled_weight_decay"]:
            ours = AdamW
        options.append({name: _number(group[name], name, where) for name in hyperparameters})
    decoupled = {g.get("decoupled_weight_decay") for g in optimizer.param_groups}
    if len(decoupled) > 1:
        raise PlanError(f"{title}: some param groups have decoupled weight decay, others not.")
    first = options[0]
    groups = [
        ParameterGroup(
            [escape(name) for name in group], **{n: v for n, v in own.items() if v != first[n]}
        )
        for group, own in zip(names, options, strict=True)
        if own != first
    ]
    return ours(**first, groups=groups)


def _names(optimizer: torch.optim.Optimizer, model: nn.Module, title: str) -> list[list[str]]:
    """The model's names of the parameters of each param group."""
    of_model = {id(value): name for name, value in model.named_parameters()}
    found: list[list[str]] = []
    for index, group in enumerate(optimizer.param_groups):
        found.append([])
        for position, value in enumerate(group["params"]):
            if id(value) not in of_model:
                raise PlanError(
                    f"{title}, param group {index}: parameter {position}, of shape "
                    f"{list(value.shape)}, is none of the model's. Make the optimizer from "
                    "model.parameters(), after the model was moved or converted."
                )
            found[-1].append(of_model[id(value)])
    held = {name for group in found for name in group}
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and n not in held]
    if left_out:
        raise PlanError(
            f"The {title} lacks {len(left_out)} parameters that require a gradient, such as "
            f"'{left_out[0]}': it would never change them. Add them, or freeze them with "
            "requires_grad_(False)."
        )
    return found


def _refuse_flags(group: Mapping[str, Any], where: str) -> None:
    for flag in _REFUSED:
        if group.get(flag):
            raise PlanError(f"{where}: {flag}=True is not supported. Leave it out.")
    if "initial_lr" in group:
        raise PlanError(
            f"{where}: a scheduler of torch is attached to it, which no program calls. Pass "
            "msc.AdamW(lr=msc.LearningRate.cosine(...)) or the like, or no scheduler."
        )
    known = {*_REFUSED, *_HOW, *(name for _, names in _KNOWN.values() for name in names)}
    for name in group:
        if name not in known and name not in ("params", "param_names", "decoupled_weight_decay"):
            raise PlanError(f"{where}: the option '{name}' is not known.")


def _number(value: Any, name: str, where: str) -> Any:
    if any(isinstance(each, Tensor) for each in (value if name == "betas" else (value,))):
        raise PlanError(f"{where}: {name} is a tensor; pass a number.")
    return value
