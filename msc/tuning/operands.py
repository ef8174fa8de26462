"""Operands for a call that is measured: of the shapes, strides and dtypes of the graph's values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


def operands(args: Any, device: torch.device) -> Any:
    """Arguments of a node, nodes replaced by tensors: normal numbers, or zeros of other dtypes."""
    return fx.map_arg(args, lambda node: _like(node.meta["val"], device))


def _like(value: Any, device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        return [_like(each, device) for each in value]
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return made.normal_() if value.dtype.is_floating_point else made.zero_()
