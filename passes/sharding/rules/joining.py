"""Ops that take a tensor apart along a dim or put several together: split, cat and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import ops

from msc.passes.sharding.rule import Dim, LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import Bound, Line, derived, dim_of, dims_of

aten = ops.aten


def runs_of(lengths: Sequence[int]) -> tuple[Dim, list[Dim], list[str]]:
    """A dim made of parts, each part's own dim, and the factors that must stay whole.

    Equal parts are a product of which the part is one factor; unequal ones are runs that share a
    factor with different lengths.
    """
    parts = [dim_of("rest", length) for length in lengths]
    if len(set(lengths)) == 1:
        return ((("part", len(lengths)), ("rest", lengths[0])),), parts, ["part"]
    whole = ["rest"] if 0 in lengths else []
    return tuple((("rest", length),) for length in lengths), parts, whole


def _split(bound: Bound) -> Rule:
    """split, chunk: one result for each part of a dim."""
    return _split_along(bound, bound.dim())


def _split_along(bound: Bound, dim: int) -> Rule:
    shape = bound.shape("self")
    lengths = [result.shape[dim] for result in bound.results]
    joined, parts, whole = runs_of(lengths)
    dims = dims_of(shape)

    def localize(local: LocalCall) -> Localized:
        local_lengths = [result[dim] for result in local.result_shapes]
        return aten.split_with_sizes.default, (local.args[0], local_lengths, dim), {}

    return bound.rule(
        {"self": (*dims[:dim], joined, *dims[dim + 1 :])},
        [(*dims[:dim], part, *dims[dim + 1 :]) for part in parts],
        whole=whole,
        linear=[["self"]],
        localize=localize,
    )


def _broadcast(bound: Bound) -> Rule:
    """broadcast_tensors: every operand to the shape of all, each its own result."""
    shape = bound.result_shape()
    dims = dims_of(shape)
    whole_dims: list[tuple[Dim, ...]] = []
    for tensor in bound.tensors("tensors"):
        aligned = dims[len(shape) - tensor.dim() :]
        lengths = shape[len(shape) - tensor.dim() :]
        whole_dims.append(
            tuple(
                dim if own == length else ((),)
                for dim, own, length in zip(aligned, tensor.shape, lengths, strict=True)
            )
        )
    return bound.rule(
        {"tensors": whole_dims}, [tuple(dims)] * len(whole_dims), linear=[["tensors"]]
    )


def _unbind(bound: Bound) -> Rule:
    dim = bound.dim()
    dims = dims_of(bound.shape("self"))
    kept = (*dims[:dim], *dims[dim + 1 :])
    return bound.rule(
        {"self": tuple(dims)}, [kept] * len(bound.results), whole=[f"d{dim}"], linear=[["self"]]
    )


def _cat(bound: Bound) -> Rule | None:
    return _joined(bound, bound.dim(rank=len(bound.result_shape())))


def stacked_along(*targets: Any, dim: int) -> Line:
    """A line for ops that join along a fixed dim tensors that have it (`hstack`, `vstack`)."""

    def build(bound: Bound) -> Rule | None:
        return _joined(bound, dim) if len(bound.result_shape()) > max(dim, 1) else None

    return derived(build, *targets)


def split_along(*targets: Any, dim: int) -> Line:
    """A line for ops that split a fixed dim (`hsplit`, `vsplit`)."""

    def build(bound: Bound) -> Rule | None:
        return _split_along(bound, dim) if len(bound.shape("self")) > max(dim, 1) else None

    return derived(build, *targets)


def _joined(bound: Bound, dim: int) -> Rule | None:
    """None where an operand has other dims, as the old-style empty one that torch drops."""
    shapes = [tuple(tensor.shape) for tensor in bound.tensors("tensors")]
    rank = len(bound.result_shape())
    if any(len(shape) != rank for shape in shapes):
        return None
    lengths = [shape[dim] for shape in shapes]
    joined, parts, whole = runs_of(lengths)
    dims = dims_of(bound.result_shape())
    return bound.rule(
        {"tensors": [(*dims[:dim], part, *dims[dim + 1 :]) for part in parts]},
        [(*dims[:dim], joined, *dims[dim + 1 :])],
        whole=whole,
        linear=[["tensors"]],
    )


def _stack(bound: Bound) -> Rule:
    tensors = bound.tensors("tensors")
    dim = bound.dim(rank=tensors[0].dim() + 1)
    dims = dims_of(tuple(tensors[0].shape))
    result = (*dims[:dim], dim_of("new", len(tensors)), *dims[dim:])
    return bound.rule(
        {"tensors": [tuple(dims)] * len(tensors)}, [result], whole=["new"], linear=[["tensors"]]
    )


JOINING = [
    derived(_broadcast, aten.broadcast_tensors),
    derived(_split, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes, aten.chunk),
    derived(_split, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes, aten.unsafe_chunk),
    derived(_split, aten.tensor_split.sections, aten.tensor_split.indices),
    split_along(aten.vsplit.int, aten.vsplit.array, dim=0),
    split_along(aten.hsplit.int, aten.hsplit.array, dim=1),
    split_along(aten.dsplit.int, aten.dsplit.array, dim=2),
    derived(_unbind, aten.unbind.int),
    derived(_cat, aten.cat, aten.concat),
    stacked_along(aten.vstack, aten.row_stack, dim=0),
    stacked_along(aten.hstack, aten.column_stack, dim=1),
    stacked_along(aten.dstack, dim=2),
    derived(_stack, aten.stack),
]
