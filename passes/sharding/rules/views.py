"""Ops that only rearrange dims: reshapes, permutations, broadcasts. All are linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import ops

from msc.passes.sharding.rule import Dim, Factor, LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import (
    EMPTY,
    Bound,
    Line,
    derived,
    dim_of,
    dims_of,
    with_arguments,
)
from msc.passes.sharding.rules.notation import from_notation

aten = ops.aten

LocalizeView = Callable[[Bound, LocalCall], Localized]


def regroup(*targets: Any, localize: LocalizeView | None = None) -> Line:
    """A line for ops that keep the elements in their order: dims are merged and taken apart.

    An operand `other` has the shape of the result.
    """

    def build(bound: Bound) -> Rule:
        before, after, whole = match_products(bound.shape("self"), bound.result_shape())
        return bound.rule(
            {"self": before, "other": after} if "other" in bound.values else {"self": before},
            [after],
            whole=whole,
            linear=[["self"]],
            localize=None if localize is None else lambda local: localize(bound, local),
        )

    return derived(build, *targets)


def match_products(
    before: Sequence[int], after: Sequence[int]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], list[str]]:
    """Dims of two shapes with the same elements in the same order, as products of common factors.

    Greedy from the front: of the two dims at hand, the smaller becomes a factor if it divides the
    larger. Where neither divides the other, their common divisor is a factor, and the rest up to
    the next common border cannot be sharded (the names returned third).

        [4, 6, 5] -> [24, 5]     (f0 f1) | f2     [8, 3] -> [2, 12]    (f0 f1) f2
    """
    old = _Side(before)
    new = _Side(after)
    whole: list[str] = []
    count = 0
    if 0 in before:
        return _unrelated(before, "old"), _unrelated(after, "new"), _names(before, after)
    while old.next() and new.next():
        factor = math.gcd(old.left, new.left)
        if factor > 1:
            for side in (old, new):
                side.take((f"f{count}", factor))
            count += 1
        if old.left > 1 and new.left > 1:  # coprime: only their leading part is common
            whole += _skip_to_border(old, new, count)
            count += 1
    return old.dims(), new.dims(), whole


class _Side:
    """One of the two shapes: the factors found so far, and what is left of the dim at hand."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape
        self.runs: list[list[Factor]] = [[] for _ in shape]
        self.at = -1
        self.left = 1

    def next(self) -> bool:
        """Go to a dim of which something is left; False at the end."""
        while self.left == 1:
            self.at += 1
            if self.at == len(self.shape):
                return False
            self.left = self.shape[self.at]
        return True

    def take(self, factor: Factor) -> None:
        self.runs[self.at].append(factor)
        self.left //= factor[1]

    def dims(self) -> tuple[Dim, ...]:
        return tuple((tuple(run),) for run in self.runs)


def _skip_to_border(old: _Side, new: _Side, count: int) -> list[str]:
    """Take whole what neither side has in common, up to where the products meet again."""
    names = []
    products = [1, 1]
    while products[0] != products[1] or products[0] == 1:
        behind = 0 if products[0] <= products[1] else 1
        side = (old, new)[behind]
        side.next()
        name = f"{('x', 'y')[behind]}{count}_{side.at}"
        products[behind] *= side.left
        side.take((name, side.left))
        names.append(name)
    return names


def _unrelated(shape: Sequence[int], prefix: str) -> tuple[Dim, ...]:
    return tuple(dims_of(shape, prefix))


def _names(before: Sequence[int], after: Sequence[int]) -> list[str]:
    return [f"old{i}" for i in range(len(before))] + [f"new{i}" for i in range(len(after))]


def _to_size(name: str) -> LocalizeView:
    """The argument that is the result's size."""
    return lambda bound, local: with_arguments(local, **{name: list(local.result_shapes[0])})


def _unflatten_sizes(bound: Bound, local: LocalCall) -> Localized:
    dim = bound.dim()
    count = len(bound.values["sizes"])
    return with_arguments(local, sizes=list(local.result_shapes[0][dim : dim + count]))


def _squeeze_named(bound: Bound, local: LocalCall) -> Localized:
    """Squeeze what has length 1 globally: a sharded dim may have length 1 on one rank only."""
    shape = bound.shape("self")
    named = bound.values.get("dim", range(len(shape)))
    named = [named] if isinstance(named, int) else named
    dims = [d % len(shape) for d in named] if shape else []
    return aten.squeeze.dims, (local.args[0], [d for d in dims if shape[d] == 1]), {}


def permutation(*targets: Any) -> Line:
    """A line for ops that permute dims. The op itself, on a tensor without data, says how."""

    def build(bound: Bound) -> Rule:
        shape = bound.shape("self")
        probe = torch.empty([2 + d for d in range(len(shape))], device="meta")
        order = [
            length - 2
            for length in bound.call.target(probe, *bound.call.args[1:], **bound.call.kwargs).shape
        ]
        dims = dims_of(shape)
        return bound.rule({"self": tuple(dims)}, [tuple(dims[d] for d in order)], linear=[["self"]])

    return derived(build, *targets)


def _expand(bound: Bound) -> Rule:
    """A dim that grows from 1, or that is new, is a factor of the result alone."""
    shape = bound.shape("self")
    result = dims_of(bound.result_shape())
    own = result[len(result) - len(shape) :]
    operands = {
        "self": tuple(
            dim if length == size else EMPTY
            for dim, length, size in zip(
                own, shape, bound.result_shape()[len(result) - len(shape) :], strict=True
            )
        )
    }
    if "other" in bound.values:
        return bound.rule({**operands, "other": tuple(result)}, [tuple(result)], linear=[["self"]])
    return bound.rule(
        operands,
        [tuple(result)],
        linear=[["self"]],
        localize=lambda local: with_arguments(local, size=list(local.result_shapes[0])),
    )


def _repeat(bound: Bound) -> Rule:
    return _repeated(bound, [int(r) for r in bound.values["repeats"]])


def _tile(bound: Bound) -> Rule:
    """Leading dims that no number stands for are not repeated."""
    counts = [int(r) for r in bound.values["dims"]]
    return _repeated(bound, [1] * (len(bound.shape("self")) - len(counts)) + counts)


def _repeated(bound: Bound, repeats: list[int]) -> Rule:
    """`[n] -> [(r n)]`: the copies r come one after the other."""
    shape = bound.shape("self")
    new = len(repeats) - len(shape)
    operand = dims_of(shape)
    result: list[Dim] = [dim_of(f"r{i}", repeats[i]) for i in range(new)]
    for index, dim in enumerate(operand):
        ((own,),) = dim
        result.append((((f"r{new + index}", repeats[new + index]), own),))

    def localize(local: LocalCall) -> Localized:
        lengths = [1] * new + list(local.operand_shapes[0])
        counts = [
            size // length if length else repeat
            for size, length, repeat in zip(local.result_shapes[0], lengths, repeats, strict=True)
        ]
        return aten.repeat.default, (local.args[0], counts), {}

    return bound.rule(
        {"self": tuple(operand)}, [tuple(result)], linear=[["self"]], localize=localize
    )


def _diagonal(bound: Bound) -> Rule:
    """What stands on the diagonal of two dims, as a new last dim."""
    dims = dims_of(bound.shape("self"))
    taken = {int(bound.values[name]) % len(dims) for name in ("dim1", "dim2")}
    kept = [dim for d, dim in enumerate(dims) if d not in taken]
    diagonal = dim_of("diagonal", bound.result_shape()[-1])
    return bound.rule(
        {"self": tuple(dims)},
        [(*kept, diagonal)],
        whole=[*(f"d{d}" for d in sorted(taken)), "diagonal"],
        linear=[["self"]],
    )


def _diag_embed(bound: Bound) -> Rule | None:
    """None where the new matrices are not the last two dims."""
    if (bound.values["dim1"], bound.values["dim2"]) != (-2, -1):
        return None
    return from_notation(bound, "...i->...jk", whole="ijk", linear="self")


def _repeat_interleave(bound: Bound) -> Rule | None:
    """`[n] -> [(n r)]`: the copies r of an element stand together."""
    if bound.values["dim"] is None:
        return None
    dim = bound.dim()
    repeats = int(bound.values["repeats"])
    operand = dims_of(bound.shape("self"))
    result = list(operand)
    ((own,),) = operand[dim]
    result[dim] = ((own, ("r", repeats)),)

    def localize(local: LocalCall) -> Localized:
        count = local.result_shapes[0][dim] // local.operand_shapes[0][dim]
        return with_arguments(local, repeats=count, output_size=None)

    return bound.rule(
        {"self": tuple(operand)}, [tuple(result)], linear=[["self"]], localize=localize
    )


VIEWS = [
    regroup(aten.view, aten._unsafe_view, localize=_to_size("size")),
    regroup(aten.reshape, localize=_to_size("shape")),
    regroup(aten.flatten.using_ints, aten.unsqueeze, aten.view_as, aten.reshape_as),
    regroup(aten.unflatten.int, localize=_unflatten_sizes),
    regroup(aten.squeeze, aten.squeeze.dim, aten.squeeze.dims, localize=_squeeze_named),
    permutation(aten.permute, aten.transpose.int, aten.t, aten.mT, aten.numpy_T, aten.adjoint),
    permutation(aten.movedim.int, aten.movedim.intlist, aten.swapaxes, aten.swapdims),
    derived(_expand, aten.expand, aten.expand_as, aten.broadcast_to),
    derived(_repeat, aten.repeat),
    derived(_tile, aten.tile),
    derived(_diagonal, aten.diagonal),
    derived(_diag_embed, aten.diag_embed),
    regroup(aten.ravel, aten.atleast_1d, aten.atleast_2d, aten.atleast_3d),
    derived(_repeat_interleave, aten.repeat_interleave.self_int),
]
