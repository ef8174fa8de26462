"""What collectives compute, from the inputs of all members in rank order.

Sums are added one member after the other, in rank order, so that results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    def fold(values: Sequence[Tensor]) -> Tensor:
        total = values[0].clone()
        for value in values[1:]:
            total = function(total, value)
        return total

    return fold


REDUCTIONS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": _sum,
    "avg": lambda values: _sum(values) / len(values),
    "max": _fold(torch.maximum),
    "min": _fold(torch.minimum),
    "product": _fold(torch.mul),
}
"""Reductions by the names that `_c10d_functional` gives them."""


def all_gather(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Each member gets all inputs, one after the other along dim 0."""
    return [torch.cat(list(inputs)) for _ in inputs]


def reduce_scatter(inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    """Member i gets part i, along dim 0, of the reduction of all inputs."""
    parts = [value.chunk(len(inputs)) for value in inputs]
    return [REDUCTIONS[op](own) for own in zip(*parts, strict=True)]


def all_reduce(inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    """Each member gets the reduction of all inputs."""
    total = REDUCTIONS[op](inputs)
    return [total, *(total.clone() for _ in inputs[1:])]


def all_to_all(inputs: Sequence[Tensor], sent: Sequence[Sequence[int]]) -> list[Tensor]:
    """Member i gets the i-th piece of each input; member j's pieces have `sent[j]` rows."""
    pieces = [torch.split(value, list(sizes)) for value, sizes in zip(inputs, sent, strict=True)]
    return [torch.cat(own) for own in zip(*pieces, strict=True)]


def run(kind: str, inputs: Sequence[Tensor], arguments: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """The results of all members; `arguments[i]` are the i-th member's, without input and group."""
    if kind == "all_gather":
        return all_gather(inputs)
    if kind == "reduce_scatter":
        return reduce_scatter(inputs, arguments[0][0])
    if kind == "all_reduce":
        return all_reduce(inputs, arguments[0][0])
    return all_to_all(inputs, [sizes for _, sizes in arguments])
