"""Runs of a dim brought to other lengths: how parts of unequal length travel as equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msc.ir.ops.library import define


def repad(x: Tensor, dim: int, runs: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """`x` with run i of `dim`, of length `runs[i]`, cut or padded with zeros to `lengths[i]`.

    The adjoint of itself with `runs` and `lengths` exchanged.
    """
    parts = []
    for part, length in zip(x.split_with_sizes(list(runs), dim), lengths, strict=True):
        missing = length - part.shape[dim]
        parts.append(part.narrow(dim, 0, min(length, part.shape[dim])))
        if missing > 0:
            shape = list(x.shape)
            shape[dim] = missing
            parts.append(x.new_zeros(shape))
    return torch.cat(parts, dim)


def _repad_fake(x: Tensor, dim: int, runs: Sequence[int], lengths: Sequence[int]) -> Tensor:
    if not 0 <= dim < x.dim() or sum(runs) != x.shape[dim] or len(runs) != len(lengths):
        raise ValueError(
            f"msc.repad: dim {dim} of {tuple(x.shape)} is not made of runs {list(runs)}, or there "
            f"are not as many lengths: {list(lengths)}"
        )
    shape = list(x.shape)
    shape[dim] = sum(lengths)
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.dim, ctx.runs, ctx.lengths = inputs


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    return REPAD(gy, ctx.dim, ctx.lengths, ctx.runs), None, None, None


REPAD = define(
    "repad(Tensor x, int dim, int[] runs, int[] lengths) -> Tensor",
    repad,
    _repad_fake,
    setup=_setup,
    backward=_backward,
)
