"""Batch statistics in training, running statistics in evaluation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msc.ir.ops.library import define


def training_value(x: Tensor, running: Tensor) -> Tensor:
    """x, as a tensor of its own: what training uses where evaluation uses `running`.

    Both have one shape and dtype. The evaluation of a program reads `running` in place of this op.
    """
    return x.clone()


def _fake(x: Tensor, running: Tensor) -> Tensor:
    if x.shape != running.shape or x.dtype != running.dtype:
        raise ValueError(
            f"training_value: x is {x.dtype} {tuple(x.shape)}, but running is {running.dtype} "
            f"{tuple(running.shape)}"
        )
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
    return gy.clone(), None


TRAINING_VALUE = define(
    "training_value(Tensor x, Tensor running) -> Tensor",
    training_value,
    _fake,
    setup=_setup,
    backward=_backward,
)
