"""Collectives over one mesh axis as opaque ops, each with the adjoint that its kind states.

They say what is communicated, not when: `lower_collectives` turns them into start and wait nodes
once the graph has been differentiated. `runs` are the lengths, on the sharded side, of the segments
of `dim`; a plain shard has one. `docs/architecture.md` has the table of placements and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from msc.ir.ops.library import define

_MINUS_INFINITY = float("-inf")
REDUCE_OPS = ("sum", "max", "logsumexp")


def all_gather(
    x: Tensor,
    dim: int,
    runs: Sequence[int],
    axis: str,
    size: int,
    grad: str,
    index: Tensor | None = None,
) -> Tensor:
    """Sharded along `dim` -> replicated.

    grad: "reduce_scatter" where the result's gradient is partial, "shard" where it is replicated;
    the latter needs `index`, this rank's coordinate on the axis.
    """
    _not_here("all_gather", axis)


def reduce_scatter(x: Tensor, dim: int, runs: Sequence[int], axis: str, size: int) -> Tensor:
    """Partial sum -> sharded along `dim`; the gradient is gathered."""
    _not_here("reduce_scatter", axis)


def all_reduce(x: Tensor, op: str, axis: str, size: int, grad: str = "identity") -> Tensor:
    """Partial -> replicated; op is sum, max or logsumexp.

    grad: "identity" where the result's gradient is replicated, "all_reduce" where it is partial.
    A max has no gradient.
    """
    _not_here("all_reduce", axis)


def grad_reduce(x: Tensor, axis: str, size: int) -> Tensor:
    """Replicated, unchanged (strides too); the gradient, which is partial, is all-reduced."""
    _not_here("grad_reduce", axis)


def shard(
    x: Tensor, dim: int, runs: Sequence[int], axis: str, size: int, index: Tensor, grad: str
) -> Tensor:
    """Replicated -> this rank's part along `dim`; local.

    grad: "all_gather" where x's gradient is to be replicated, "pad" where it is to be partial.
    """
    parts = x.split_with_sizes([run * size for run in runs], dim)
    here = int(index)
    mine = [part.narrow(dim, here * run, run) for part, run in zip(parts, runs, strict=True)]
    return torch.cat(mine, dim)


def shard_pad(
    x: Tensor, dim: int, runs: Sequence[int], axis: str, size: int, index: Tensor
) -> Tensor:
    """This rank's part along `dim` -> the whole with zeros elsewhere: a partial sum; local."""
    shape = list(x.shape)
    shape[dim] *= size
    whole = x.new_zeros(shape)
    parts = whole.split_with_sizes([run * size for run in runs], dim)
    here = int(index)
    for part, mine, run in zip(parts, x.split_with_sizes(list(runs), dim), runs, strict=True):
        part.narrow(dim, here * run, run).copy_(mine)
    return whole


def logsumexp_grad(gy: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of x for `y = all_reduce(x, "logsumexp")`: `gy * exp(x - y)`; local."""
    return gy * (x - y.masked_fill(y == _MINUS_INFINITY, 0.0)).exp_()


def _not_here(op: str, axis: str) -> NoReturn:
    raise RuntimeError(
        f"msc.{op} over mesh axis '{axis}' runs only inside an executor: one process alone has "
        "nothing to communicate with. Compile the model with msc.compile and run the program, or "
        "use msc.ir.ops.collectives.simulate for the meaning over all ranks."
    )


def _check_runs(op: str, x: Tensor, dim: int, runs: Sequence[int], parts: int) -> None:
    if not 0 <= dim < x.dim() or sum(runs) * parts != x.shape[dim]:
        raise ValueError(
            f"msc.{op}: dim {dim} of {tuple(x.shape)} is not made of runs {list(runs)}"
            + (f" on each of {parts} ranks" if parts > 1 else "")
        )


def _check_choice(op: str, name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"msc.{op}: {name}={value!r} is none of {', '.join(allowed)}")


def _scaled(x: Tensor, dim: int, numerator: int, denominator: int = 1) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * numerator // denominator
    return x.new_empty(shape)


def _all_gather_fake(
    x: Tensor,
    dim: int,
    runs: Sequence[int],
    axis: str,
    size: int,
    grad: str,
    index: Tensor | None = None,
) -> Tensor:
    _check_runs("all_gather", x, dim, runs, 1)
    _check_choice("all_gather", "grad", grad, ("reduce_scatter", "shard"))
    if grad == "shard" and index is None:
        raise ValueError("msc.all_gather: grad='shard' needs index, this rank's coordinate")
    return _scaled(x, dim, size)


def _reduce_scatter_fake(x: Tensor, dim: int, runs: Sequence[int], axis: str, size: int) -> Tensor:
    _check_runs("reduce_scatter", x, dim, runs, size)
    return _scaled(x, dim, 1, size)


def _all_reduce_fake(x: Tensor, op: str, axis: str, size: int, grad: str = "identity") -> Tensor:
    _check_choice("all_reduce", "op", op, REDUCE_OPS)
    _check_choice("all_reduce", "grad", grad, ("identity", "all_reduce"))
    return x.new_empty(x.shape)


def _grad_reduce_fake(x: Tensor, axis: str, size: int) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


def _shard_fake(
    x: Tensor, dim: int, runs: Sequence[int], axis: str, size: int, index: Tensor, grad: str
) -> Tensor:
    _check_runs("shard", x, dim, runs, size)
    _check_choice("shard", "grad", grad, ("all_gather", "pad"))
    return _scaled(x, dim, 1, size)


def _shard_pad_fake(
    x: Tensor, dim: int, runs: Sequence[int], axis: str, size: int, index: Tensor
) -> Tensor:
    _check_runs("shard_pad", x, dim, runs, 1)
    return _scaled(x, dim, size)


def _logsumexp_grad_fake(gy: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *ctx.where, ctx.grad, index = inputs
    ctx.save_for_backward(index)


def _all_gather_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.grad == "reduce_scatter":
        gx = REDUCE_SCATTER(gy, *ctx.where)
    else:
        (index,) = ctx.saved_tensors
        gx = SHARD(gy, *ctx.where, index, "all_gather")
    return gx, None, None, None, None, None, None


def _reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *ctx.where = inputs


def _reduce_scatter_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    return ALL_GATHER(gy, *ctx.where, "reduce_scatter"), None, None, None, None


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.op, ctx.axis, ctx.size, ctx.grad = inputs
    if ctx.op == "max":
        ctx.mark_non_differentiable(output)
    if ctx.op == "logsumexp":
        ctx.save_for_backward(x, output)


def _all_reduce_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    gx = ALL_REDUCE(gy, "sum", ctx.axis, ctx.size) if ctx.grad == "all_reduce" else gy
    if ctx.op == "logsumexp":
        gx = LOGSUMEXP_GRAD(gx, *ctx.saved_tensors)
    return gx, None, None, None, None


def _grad_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.axis, ctx.size = inputs


def _grad_reduce_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    return ALL_REDUCE(gy, "sum", ctx.axis, ctx.size), None, None


def _shard_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *ctx.where, index, ctx.grad = inputs
    ctx.save_for_backward(index)


def _shard_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.grad == "all_gather":
        gx = ALL_GATHER(gy, *ctx.where, "reduce_scatter")
    else:
        gx = SHARD_PAD(gy, *ctx.where, *ctx.saved_tensors)
    return gx, None, None, None, None, None, None


SHARD_PAD = define(
    "shard_pad(Tensor x, int dim, int[] runs, str axis, int size, Tensor index) -> Tensor",
    shard_pad,
    _shard_pad_fake,
)
LOGSUMEXP_GRAD = define(
    "logsumexp_grad(Tensor gy, Tensor x, Tensor y) -> Tensor", logsumexp_grad, _logsumexp_grad_fake
)
ALL_GATHER = define(
    "all_gather(Tensor x, int dim, int[] runs, str axis, int size, str grad, Tensor? index=None)"
    " -> Tensor",
    all_gather,
    _all_gather_fake,
    setup=_all_gather_setup,
    backward=_all_gather_backward,
)
REDUCE_SCATTER = define(
    "reduce_scatter(Tensor x, int dim, int[] runs, str axis, int size) -> Tensor",
    reduce_scatter,
    _reduce_scatter_fake,
    setup=_reduce_scatter_setup,
    backward=_reduce_scatter_backward,
)
ALL_REDUCE = define(
    'all_reduce(Tensor x, str op, str axis, int size, str grad="identity") -> Tensor',
    all_reduce,
    _all_reduce_fake,
    setup=_all_reduce_setup,
    backward=_all_reduce_backward,
)
GRAD_REDUCE = define(
    "grad_reduce(Tensor x, str axis, int size) -> Tensor",
    grad_reduce,
    _grad_reduce_fake,
    setup=_grad_reduce_setup,
    backward=_grad_reduce_backward,
)
SHARD = define(
    "shard(Tensor x, int dim, int[] runs, str axis, int size, Tensor index, str grad) -> Tensor",
    shard,
    _shard_fake,
    setup=_shard_setup,
    backward=_shard_backward,
)

COMMUNICATING = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, GRAD_REDUCE)
"""The ops that a rank cannot compute alone; `shard` and `shard_pad` it can."""


def simulate(op_name: str, inputs: list[Tensor], **attrs: Any) -> list[Tensor]:
    """What a collective yields on every rank, given every rank's input, both in rank order.

    attrs: the op's attributes by name (`dim`, `runs`, `op`); those that concern one rank or the
    gradient (`axis`, `size`, `index`, `grad`) are accepted and ignored.
    """
    if op_name not in _MEANINGS:
        known = ", ".join(sorted(_MEANINGS))
        raise ValueError(f"{op_name!r} is no collective of MSC; they are {known}")
    return _MEANINGS[op_name](inputs, attrs)


def _gathered(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    dim, runs = attrs["dim"], list(attrs["runs"])
    pieces = [x.split_with_sizes(runs, dim) for x in inputs]
    whole = torch.cat([rank[run] for run in range(len(runs)) for rank in pieces], dim)
    return [whole.clone() for _ in inputs]


def _sharded(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    dim, runs, size = attrs["dim"], attrs["runs"], len(inputs)
    return [
        shard(x, dim, runs, "", size, torch.tensor(rank), "pad") for rank, x in enumerate(inputs)
    ]


def _padded(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    dim, runs, size = attrs["dim"], attrs["runs"], len(inputs)
    return [shard_pad(x, dim, runs, "", size, torch.tensor(rank)) for rank, x in enumerate(inputs)]


def _reduced(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    stacked = torch.stack(inputs)
    op = attrs.get("op", "sum")
    if op == "max":
        total = stacked.amax(0)
    elif op == "logsumexp":
        total = stacked.logsumexp(0)
    else:
        total = stacked.sum(0)
    return [total.clone() for _ in inputs]


def _reduce_scattered(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    return _sharded(_reduced(inputs, {"op": "sum"}), attrs)


def _unchanged(inputs: list[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    return [x.clone() for x in inputs]


_MEANINGS: dict[str, Callable[[list[Tensor], dict[str, Any]], list[Tensor]]] = {
    "all_gather": _gathered,
    "reduce_scatter": _reduce_scattered,
    "all_reduce": _reduced,
    "grad_reduce": _unchanged,
    "shard": _sharded,
    "shard_pad": _padded,
}
