"""A collective and the GEMMs that read or make its value, as one op.

The op is complete when it returns: there is no start and no wait. What it sends, it sends in parts,
one for each rank, so that the parts travel while others are multiplied. The parts are runs of one
dim of rows; the dim that a GEMM contracts, or that its weight adds, is never cut. Executors decide
how it runs; `products` and `product` are what one rank computes of it, for those that gather before
the GEMM, or reduce after it.
"""

# Shape letters: `...` any leading dims (the rows), k and n the dims of a weight.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from msc.ir.ops.library import define
from msc.ir.ops.linear import linear, linear_wgrad


def all_gather_matmul(
    x: Tensor,
    dim: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    others: Sequence[Tensor],
    is_first: Sequence[bool],
    keep: bool,
    size: int,
    group: str,
) -> list[Tensor]:
    """Gather x `[..., k]` along its row dim `dim` over `size` ranks to X, and multiply.

    Returns, in order: for each weight `linear(X, weight, bias, transposed)`, `[..., n]`; for each
    of `others`, `[..., n]` with the rows of X, the product over rows `linear_wgrad(X, other)`
    `[k, n]`, or where `is_first` is False `linear_wgrad(other, X)` `[n, k]`; with `keep` X itself.
    """
    _not_here("all_gather_matmul", group)


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    transposed: bool,
    dim: int,
    size: int,
    group: str,
) -> Tensor:
    """`linear(x, weight, None, transposed) + add`, summed over `size` ranks in rank order.

    Of the sum `[..., n]` this rank gets its part of row dim `dim`. add: a bias `[n]`, or what is
    summed with the product, `[..., n]`; each rank adds its own.
    """
    _not_here("matmul_reduce_scatter", group)


def products(
    gathered: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    others: Sequence[Tensor],
    is_first: Sequence[bool],
    keep: bool,
) -> list[Tensor]:
    """What `all_gather_matmul` returns, from the gathered value; local."""
    results = [
        linear(gathered, weight, bias, flag)
        for weight, bias, flag in zip(weights, biases, transposed, strict=True)
    ]
    results += over_rows(gathered, others, is_first)
    return [*results, gathered] if keep else results


def over_rows(gathered: Tensor, others: Sequence[Tensor], is_first: Sequence[bool]) -> list[Tensor]:
    """The products of `all_gather_matmul` that contract the rows; local."""
    return [
        linear_wgrad(gathered, other) if first else linear_wgrad(other, gathered)
        for other, first in zip(others, is_first, strict=True)
    ]


def product(x: Tensor, weight: Tensor, add: Tensor | None, transposed: bool) -> Tensor:
    """This rank's summand of `matmul_reduce_scatter`, `[..., n]`; local."""
    if add is None or add.dim() == 1:
        return linear(x, weight, add, transposed)
    rows = x.reshape(-1, x.shape[-1])
    matrix = weight if transposed else weight.t()
    return torch.addmm(add.reshape(rows.shape[0], -1), rows, matrix).view(add.shape)


def from_parts(parts: Tensor, shape: Sequence[int], dim: int, size: int) -> Tensor:
    """Ranks' shards one after the other, each of `shape` -> the value gathered along `dim`."""
    before, behind = math.prod(shape[:dim]), math.prod(shape[dim:])
    whole = (*shape[:dim], size * shape[dim], *shape[dim + 1 :])
    return parts.view(size, before, behind).transpose(0, 1).reshape(whole)


def into_parts(whole: Tensor, dim: int, size: int) -> Tensor:
    """The reverse of `from_parts`: `[size * part, ...]`, where `part` is a shard's dim 0."""
    shape = part_shape(whole.shape, dim, size)
    before, behind = math.prod(shape[:dim]), math.prod(shape[dim:])
    parts = whole.reshape(before, size, behind).transpose(0, 1)
    return parts.reshape(size * shape[0], *shape[1:])


def part_shape(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """The shape of a rank's part of a value that is split along `dim`."""
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def _not_here(op: str, group: str) -> NoReturn:
    raise RuntimeError(
        f"msc.{op} over '{group}' runs only inside an executor: one process alone has nothing to "
        "communicate with."
    )


def _check_rows(op: str, x: Tensor, dim: int, parts: int) -> None:
    if not 0 <= dim < x.dim() - 1 or x.shape[dim] % parts:
        raise ValueError(
            f"msc.{op}: dim {dim} of {tuple(x.shape)} is no dim of rows that {parts} ranks divide"
        )


def _all_gather_matmul_fake(
    x: Tensor,
    dim: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    others: Sequence[Tensor],
    is_first: Sequence[bool],
    keep: bool,
    size: int,
    group: str,
) -> list[Tensor]:
    _check_rows("all_gather_matmul", x, dim, 1)
    rows = [*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 : -1]]
    k = x.shape[-1]
    results = []
    for weight, flag in zip(weights, transposed, strict=True):
        _check_weight("all_gather_matmul", x, weight, flag)
        results.append(x.new_empty((*rows, weight.shape[1 if flag else 0])))
    for other, first in zip(others, is_first, strict=True):
        n = other.shape[-1]
        if other.numel() != math.prod(rows) * n:
            raise ValueError(
                f"msc.all_gather_matmul: {tuple(other.shape)} does not have the rows of x "
                f"{tuple(x.shape)} gathered along dim {dim} over {size} ranks"
            )
        results.append(x.new_empty((k, n) if first else (n, k)))
    return [*results, x.new_empty((*rows, k))] if keep else results


def _matmul_reduce_scatter_fake(
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    transposed: bool,
    dim: int,
    size: int,
    group: str,
) -> Tensor:
    _check_rows("matmul_reduce_scatter", x, dim, size)
    _check_weight("matmul_reduce_scatter", x, weight, transposed)
    n = weight.shape[1 if transposed else 0]
    if add is not None and tuple(add.shape) not in ((n,), (*x.shape[:-1], n)):
        raise ValueError(
            f"msc.matmul_reduce_scatter: add {tuple(add.shape)} is neither a bias ({n},) nor of "
            f"the product's shape {(*x.shape[:-1], n)}"
        )
    return x.new_empty(part_shape((*x.shape[:-1], n), dim, size))


def _check_weight(op: str, x: Tensor, weight: Tensor, transposed: bool) -> None:
    if weight.dim() != 2 or weight.shape[0 if transposed else 1] != x.shape[-1]:
        raise ValueError(
            f"msc.{op}: x {tuple(x.shape)} and weight {tuple(weight.shape)} "
            f"(transposed={transposed}) do not fit together"
        )


ALL_GATHER_MATMUL = define(
    "all_gather_matmul(Tensor x, int dim, Tensor[] weights, Tensor?[] biases, bool[] transposed,"
    " Tensor[] others, bool[] is_first, bool keep, int size, str group) -> Tensor[]",
    all_gather_matmul,
    _all_gather_matmul_fake,
)
MATMUL_REDUCE_SCATTER = define(
    "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? add, bool transposed, int dim,"
    " int size, str group) -> Tensor",
    matmul_reduce_scatter,
    _matmul_reduce_scatter_fake,
)
