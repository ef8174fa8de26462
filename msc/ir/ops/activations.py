"""Activations that other ops apply: by name, on a copy or in place, and their ATen calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """apply: to a new tensor; overwrite: in place.

    gradient: of its operand, from (gy, operand), in place of gy.
    """

    apply: Callable[[Tensor], Tensor]
    overwrite: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _gelu(approximate: str) -> Activation:
    def apply(x: Tensor) -> Tensor:
        y: Tensor = _aten.gelu(x, approximate=approximate)
        return y

    def overwrite(x: Tensor) -> Tensor:
        y: Tensor = _aten.gelu_(x, approximate=approximate)
        return y

    def gradient(gy: Tensor, x: Tensor) -> Tensor:
        gx: Tensor = _aten.gelu_backward.grad_input(gy, x, approximate=approximate, grad_input=gy)
        return gx

    return Activation(apply, overwrite, gradient)


def _relu_gradient(gy: Tensor, x: Tensor) -> Tensor:
    gx: Tensor = _aten.threshold_backward.grad_input(gy, x, 0, grad_input=gy)
    return gx


def _silu_gradient(gy: Tensor, x: Tensor) -> Tensor:
    gx: Tensor = _aten.silu_backward.grad_input(gy, x, grad_input=gy)
    return gx


ACTIVATIONS = {
    "relu": Activation(torch.relu, torch.relu_, _relu_gradient),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "silu": Activation(_aten.silu, _aten.silu_, _silu_gradient),
}
"""By name; "gelu" is with erf (Hendrycks and Gimpel, 2016, section 2), "gelu_tanh" its estimate."""


def activation_of(node: Any) -> str:
    """The name of the activation that a node of ATen calls; "" where it calls none of them."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    if node.target is _aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    if node.target is _aten.relu.default:
        return "relu"
    return "silu" if node.target is _aten.silu.default else ""
