"""Optimizers as plain data, for files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from msc.ir.encoding import Decoder, encode
from msc.ir.optimizer.adam import Adam, AdamW
from msc.ir.optimizer.base import Optimizer
from msc.ir.optimizer.group import ParameterGroup
from msc.ir.optimizer.lamb import LAMB
from msc.ir.optimizer.learning_rate import LearningRate
from msc.ir.optimizer.sgd import SGD

OPTIMIZERS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (AdamW, Adam, SGD, LAMB)}
"""All optimizers by name."""


def optimizer_to_json(optimizer: Optimizer) -> dict[str, Any]:
    """The name and all fields of an optimizer; equal ones give equal data."""
    values = {f.name: getattr(optimizer, f.name) for f in fields(optimizer)}
    values["groups"] = [
        {
            "patterns": list(group.patterns),
            "max_dims": group.max_dims,
            "options": {name: _value_to_json(value) for name, value in group.options},
        }
        for group in optimizer.groups
    ]
    data = {n: v if n == "groups" else _value_to_json(v) for n, v in values.items()}
    return {"name": optimizer.name, **data}


def optimizer_from_json(data: Mapping[str, Any]) -> Optimizer:
    """The optimizer of which `optimizer_to_json` made `data`."""
    values = {n: _value_from_json(v) for n, v in data.items() if n not in ("name", "groups")}
    groups = [
        ParameterGroup(
            group["patterns"],
            max_dims=group["max_dims"],
            **{name: _value_from_json(value) for name, value in group["options"].items()},
        )
        for group in data["groups"]
    ]
    return OPTIMIZERS[data["name"]](**values, groups=groups)


def _value_to_json(value: Any) -> Any:
    if isinstance(value, LearningRate):
        phases = [encode(tuple(phase)) for phase in value.phases]
        return {"phases": phases, "held": encode(value.held)}
    return encode(value)


def _value_from_json(data: Any) -> Any:
    decode = Decoder().decode
    if isinstance(data, dict) and "phases" in data:
        phases = tuple(decode(phase, {}) for phase in data["phases"])
        return LearningRate(phases, decode(data["held"], {}))
    return decode(data, {})
