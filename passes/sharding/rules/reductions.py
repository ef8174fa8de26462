"""Ops that reduce dims, and ops that need a dim whole but keep it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import ops

from msc.ir.placement import ReduceOp
from msc.passes.sharding.rule import Dim, LocalCall, Localize, Localized, Rule
from msc.passes.sharding.rules.binding import (
    EMPTY,
    Bound,
    Line,
    derived,
    dim_of,
    dims_of,
    leaves,
)
from msc.passes.sharding.rules.notation import line

aten = ops.aten


def reduction(*targets: Any, over: ReduceOp | None, linear: bool = False) -> Line:
    """A line for ops that reduce their dims `dim`, or all.

    over: what the results are if a reduced dim is sharded; None if it has to be whole.
    """
    return derived(lambda bound: _reduction(bound, over, linear), *targets)


def along(*targets: Any, dims: str, linear: bool = False) -> Line:
    """A line for ops that need the dims that argument `dims` names whole, and keep all dims."""
    return derived(lambda bound: _along(bound, _reduced(bound, dims), linear), *targets)


def along_last(*targets: Any, count: int, linear: bool = False) -> Line:
    """A line for ops that need the last `count` dims whole, and keep all dims."""

    def build(bound: Bound) -> Rule:
        rank = len(bound.shape("self"))
        return _along(bound, list(range(rank))[-count:], linear)

    return derived(build, *targets)


def _reduced(bound: Bound, name: str = "dim") -> list[int]:
    """The dims that an argument names; all if it names none."""
    rank = len(bound.shape("self"))
    given = [d for d in leaves(bound.values.get(name)) if d is not None]
    return [d % max(rank, 1) for d in given] if given and rank else list(range(rank))


def _reduction(
    bound: Bound, over: ReduceOp | None, linear: bool, localize: Localize | None = None
) -> Rule:
    dims = dims_of(bound.shape("self"))
    reduced = _reduced(bound)
    kept: list[Dim] = []
    for index, dim in enumerate(dims):
        if index not in reduced:
            kept.append(dim)
        elif bound.values.get("keepdim"):
            kept.append(EMPTY)
    names = [f"d{index}" for index in reduced]
    return bound.rule(
        {"self": tuple(dims)},
        [tuple(kept)] * len(bound.results),
        contracted={name: over for name in names} if over else {},
        whole=() if over else names,
        linear=[["self"]] if linear else [],
        localize=localize,
    )


def scaled_sum(
    x: torch.Tensor,
    dim: list[int],
    keepdim: bool,
    dtype: torch.dtype | None,
    scale: float,
) -> torch.Tensor:
    """This rank's share of a mean over sharded dims: the local sum times one over the count."""
    total = aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
    return aten.mul.Tensor(total, scale)  # type: ignore[no-any-return]


def _mean(bound: Bound) -> Rule:
    """A mean over a sharded dim is a sum times one over the global length."""
    reduced = _reduced(bound)
    shape = bound.shape("self")
    count = math.prod(shape[d] for d in reduced)
    keepdim = bool(bound.values.get("keepdim"))
    dtype = bound.values["dtype"]

    def localize(local: LocalCall) -> Localized:
        if math.prod(local.operand_shapes[0][d] for d in reduced) == count:
            return local.target, local.args, local.kwargs
        return scaled_sum, (local.args[0], reduced, keepdim, dtype, 1.0 / count), {}

    return _reduction(bound, "sum", True, localize)


def _along(bound: Bound, whole: list[int], linear: bool) -> Rule:
    dims = dims_of(bound.shape("self"))
    results = [
        tuple(
            dim_of(f"r{d}", length) if d in whole else dims[d]
            for d, length in enumerate(result.shape)
        )
        for result in bound.results
    ]
    names = [f"{prefix}{d}" for d in whole for prefix in "dr"]
    return bound.rule(
        {"self": tuple(dims)}, results, whole=names, linear=[["self"]] if linear else []
    )


def _diff(bound: Bound) -> Rule:
    """The dim is whole in what is diffed and in what is put before and behind it."""
    dim = bound.dim()
    result = dims_of(bound.result_shape())
    operands = {}
    whole = [f"d{dim}"]
    for name in ("self", "prepend", "append"):
        if bound.has_tensor(name):
            own = dim_of(f"{name}{dim}", bound.shape(name)[dim])
            operands[name] = (*result[:dim], own, *result[dim + 1 :])
            whole.append(f"{name}{dim}")
    return bound.rule(operands, [tuple(result)], whole=whole, linear=[[*operands]])


def _histc(bound: Bound) -> Rule:
    """Bins between given ends add up over the ranks; else the ends depend on all elements."""
    dims = dims_of(bound.shape("self"))
    names = [f"d{d}" for d in range(len(dims))]
    given = bound.values["min"] != bound.values["max"]
    return bound.rule(
        {"self": tuple(dims)},
        [(dim_of("bins", bound.result_shape()[0]),)],
        contracted=dict.fromkeys(names, "sum"),
        whole=["bins"] if given else ["bins", *names],
    )


REDUCTIONS = [
    reduction(aten.sum, aten.sum.dim_IntList, over="sum", linear=True),
    reduction(aten.nansum, over="sum"),
    derived(_mean, aten.mean, aten.mean.dim),
    reduction(aten.amax, aten.max, over="max"),
    reduction(aten.logsumexp, over="logsumexp"),
    reduction(aten.amin, aten.min, aten.max.dim, aten.min.dim, over=None),
    reduction(aten.argmax, aten.argmin, over=None),
    reduction(aten.any, aten.any.dim, aten.any.dims, over=None),
    reduction(aten.all, aten.all.dim, aten.all.dims, over=None),
    reduction(aten.prod, aten.prod.dim_int, over=None),
    reduction(aten.var.dim, aten.var.correction, aten.std.dim, aten.std.correction, over=None),
    reduction(aten.var, aten.std, aten.var_mean.correction, over=None),
    reduction(aten.var_mean, aten.std_mean, aten.var_mean.dim, aten.std_mean.dim, over=None),
    reduction(aten.std_mean.correction, aten.nanmean, aten.aminmax, over=None),
    reduction(aten.median, aten.median.dim, aten.nanmedian.dim, over=None),
    reduction(aten.mode, aten.kthvalue, over=None),
    reduction(aten.linalg_vector_norm, aten.norm.ScalarOpt_dim, aten.count_nonzero, over=None),
    along(aten.softmax.int, aten.log_softmax.int, aten._softmax, aten._log_softmax, dims="dim"),
    along(aten._safe_softmax, aten.cumprod, aten.logcumsumexp, dims="dim"),
    along(aten.cummax, aten.cummin, aten.special_softmax, dims="dim"),
    along(aten.cumsum, dims="dim", linear=True),
    derived(_diff, aten.diff),
    derived(_histc, aten.histc),
    along(aten.topk, aten.sort, aten.sort.stable, aten.argsort, aten.argsort.stable, dims="dim"),
    along(aten.flip, aten.roll, aten.rot90, dims="dims", linear=True),
    line("i...->i...", aten.msort, whole="i"),
    line("i...->i...", aten.flipud, whole="i", linear="self"),
    line("ij...->ij...", aten.fliplr, whole="j", linear="self"),
    along_last(aten.tril, aten.triu, count=2, linear=True),
]
