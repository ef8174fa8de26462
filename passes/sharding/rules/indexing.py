"""Ops that pick, place or pad elements along a dim. The dim stays whole, all others are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import ops

from msc.passes.sharding.rule import Dim, Dims, LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import (
    Bound,
    broadcast_dims,
    derived,
    dim_of,
    dims_of,
)
from msc.passes.sharding.rules.notation import from_notation, line

aten = ops.aten


def _select(bound: Bound) -> Rule:
    dim = bound.dim()
    dims = dims_of(bound.shape("self"))
    kept = (*dims[:dim], *dims[dim + 1 :])
    return bound.rule({"self": tuple(dims)}, [kept], whole=[f"d{dim}"], linear=[["self"]])


def _slice(bound: Bound) -> Rule:
    """A slice of everything keeps its factor; any other needs the dim whole."""
    dim = bound.dim()
    shape = bound.shape("self")
    length = bound.result_shape()[dim]
    dims = dims_of(shape)
    if length == shape[dim]:
        return bound.rule(
            {"self": tuple(dims)},
            [tuple(dims)],
            linear=[["self"]],
            localize=lambda local: _whole_slice(local, dim),
        )
    result = (*dims[:dim], dim_of("picked", length), *dims[dim + 1 :])
    return bound.rule(
        {"self": tuple(dims)}, [result], whole=[f"d{dim}", "picked"], linear=[["self"]]
    )


def _whole_slice(local: LocalCall, dim: int) -> Localized:
    return aten.slice.Tensor, (local.args[0], dim, 0, local.result_shapes[0][dim]), {}


def _pad(bound: Bound) -> Rule:
    """Padding with zeros is linear; so are the modes that repeat elements of the tensor."""
    shape = bound.shape("self")
    result_shape = bound.result_shape()
    pads = list(bound.values["pad"])
    padded = {len(shape) - 1 - i // 2 for i, count in enumerate(pads) if count != 0}
    dims = dims_of(shape)
    result = dims_of(result_shape, "r")
    zero = bound.values.get("mode", "constant") != "constant" or not bound.values["value"]
    return bound.rule(
        {"self": tuple(dims)},
        [tuple(result[d] if d in padded else dims[d] for d in range(len(shape)))],
        whole=[f"{prefix}{d}" for d in padded for prefix in "dr"],
        linear=[["self"]] if zero else [],
    )


def _index_select(bound: Bound) -> Rule:
    """The factor of the index takes the place of the dim's."""
    dim = bound.dim()
    dims = dims_of(bound.shape("self"))
    picked = dim_of("picked", bound.result_shape()[dim])
    index = (picked,) if len(bound.shape("index")) else ()
    return bound.rule(
        {"self": tuple(dims), "index": index},
        [(*dims[:dim], picked, *dims[dim + 1 :])],
        whole=[f"d{dim}"] if index else [f"d{dim}", "picked"],
        linear=[["self"]],
    )


@dataclass(frozen=True)
class _Indexed:
    """x[i, :, j]: the dims of x, of the (broadcast) indices, and of what they pick.

    The indices' dims stand where the indexed ones stood; at the front, if those are no neighbours.
    """

    source: tuple[Dim, ...]
    indices: list[Dims]
    picked: tuple[Dim, ...]
    indexed: tuple[int, ...]
    index_rank: int


def _indexed(bound: Bound) -> _Indexed | None:
    """None for a boolean index: the number of elements that it picks depends on data."""
    tensors = bound.tensors("indices")
    if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors):
        return None
    entries = bound.values["indices"]
    indexed = [d for d, entry in enumerate(entries) if entry is not None]
    source = dims_of(bound.shape("self"))
    rank = max(tensor.dim() for tensor in tensors)
    common = [_length_at(tensors, d) for d in range(rank, 0, -1)]
    index = dims_of(common, "i")
    kept = [d for d in range(len(source)) if d not in indexed]
    neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    front = indexed[0] if neighbours else 0
    picked = [*(source[d] for d in kept[:front]), *index, *(source[d] for d in kept[front:])]
    dims = [broadcast_dims(tuple(tensor.shape), index) for tensor in tensors]
    return _Indexed(tuple(source), dims, tuple(picked), tuple(indexed), rank)


def _length_at(tensors: Sequence[torch.Tensor], from_behind: int) -> int:
    """The length that the tensors broadcast to at a dim counted from behind."""
    lengths = [tensor.shape[-from_behind] for tensor in tensors if tensor.dim() >= from_behind]
    return next((length for length in lengths if length != 1), 1)


def _index(bound: Bound) -> Rule | None:
    found = _indexed(bound)
    if found is None:
        return None
    return bound.rule(
        {"self": found.source, "indices": found.indices},
        [found.picked],
        whole=[f"d{d}" for d in found.indexed],
        linear=[["self"]],
    )


def _index_put(bound: Bound) -> Rule | None:
    """Every rank writes all of what the indices name, in its part of the other dims."""
    found = _indexed(bound)
    if found is None:
        return None
    names = [f"d{d}" for d in found.indexed] + [f"i{d}" for d in range(found.index_rank)]
    values = broadcast_dims(bound.shape("values"), found.picked)
    return bound.rule(
        {"self": found.source, "indices": found.indices, "values": values},
        [found.source],
        whole=names,
        linear=[["self", "values"]],
    )


def _index_add(bound: Bound) -> Rule:
    dim = bound.dim()
    dims = dims_of(bound.shape("self"))
    picked = dim_of("picked", bound.shape("source")[dim])
    index = (picked,) if len(bound.shape("index")) else ()
    source = (*dims[:dim], picked, *dims[dim + 1 :])
    return bound.rule(
        {"self": tuple(dims), "index": index, "source": source},
        [tuple(dims)],
        whole=[f"d{dim}", "picked"],
        linear=[["self", "source"]],
    )


def _gather(bound: Bound) -> Rule:
    return _gathered(bound, "index")


def _take_along(bound: Bound) -> Rule | None:
    """As gather; None if the two broadcast, or all dims are one."""
    if bound.values["dim"] is None or len(bound.shape("self")) != len(bound.shape("indices")):
        return None
    dim = bound.dim()
    pairs = zip(bound.shape("self"), bound.shape("indices"), strict=True)
    if any(own != index for d, (own, index) in enumerate(pairs) if d != dim):
        return None
    return _gathered(bound, "indices")


def _gathered(bound: Bound, name: str) -> Rule:
    """Other dims are shared where the index covers them; else the rest is never read."""
    shape, index_shape = bound.shape("self"), bound.shape(name)
    dim = bound.dim()
    index = dims_of(index_shape, "i")
    source = dims_of(shape)
    whole = [f"d{dim}"]
    for d in range(len(shape)):
        if d != dim and shape[d] == index_shape[d]:
            source[d] = index[d]
        elif d != dim:
            whole += [f"d{d}", f"i{d}"]
    return bound.rule(
        {"self": tuple(source), name: tuple(index)},
        [tuple(index)],
        whole=whole,
        linear=[["self"]],
    )


def _index_fill(bound: Bound) -> Rule:
    dim = bound.dim()
    dims = dims_of(bound.shape("self"))
    index = dims_of(bound.shape("index"), "i")
    return bound.rule(
        {"self": tuple(dims), "index": tuple(index)},
        [tuple(dims)],
        whole=[f"d{dim}", "i0"],
        linear=[["self"]] if bound.values["value"] == 0 else [],
    )


def _write_part(bound: Bound) -> Rule:
    """select_scatter, slice_scatter: x with `src` in place of what a select or slice names."""
    dim = bound.dim()
    dims = dims_of(bound.shape("self"))
    source_shape = bound.shape("src")
    own = [dim_of("written", source_shape[dim])] if len(source_shape) == len(dims) else []
    return bound.rule(
        {"self": tuple(dims), "src": (*dims[:dim], *own, *dims[dim + 1 :])},
        [tuple(dims)],
        whole=[f"d{dim}", "written"],
        linear=[["self", "src"]],
    )


def _one_hot(bound: Bound) -> Rule | None:
    """None where the number of classes depends on data."""
    if bound.values["num_classes"] < 0:
        return None
    dims = dims_of(bound.shape("self"))
    classes = dim_of("classes", bound.result_shape()[-1])
    return bound.rule({"self": tuple(dims)}, [(*dims, classes)], whole=["classes"])


def _scatter(bound: Bound) -> Rule:
    """Dims other than `dim` are shared where operands agree on them, and else whole."""
    dim = bound.dim()
    shapes = {n: bound.shape(n) for n in ("self", "index", "src") if bound.positions.get(n)}
    operands = {name: dims_of(shape, name) for name, shape in shapes.items()}
    whole: list[str] = []
    for d in range(len(shapes["self"])):
        if d != dim and len({shape[d] for shape in shapes.values()}) == 1:
            for dims in operands.values():
                dims[d] = operands["self"][d]
        else:
            whole += [f"{name}{d}" for name in operands]
    zero = bound.values.get("value") == 0
    linear = "src" in operands and bound.values.get("reduce", "sum") == "sum"
    return bound.rule(
        {name: tuple(dims) for name, dims in operands.items()},
        [tuple(operands["self"])],
        whole=whole,
        linear=[["self", "src"]] if linear else [["self"]] * zero,
    )


def _search(bound: Bound) -> Rule | None:
    """None where each row is searched in a sequence of its own."""
    if len(bound.shape("sorted_sequence")) != 1:
        return None
    return from_notation(bound, "b,...,b->...", whole="b")


def _is_in(bound: Bound) -> Rule:
    """Whether elements are among all of the others."""
    dims = dims_of(bound.shape("elements"))
    others = dims_of(bound.shape("test_elements"), "t")
    return bound.rule(
        {"elements": tuple(dims), "test_elements": tuple(others)},
        [tuple(dims)],
        whole=[f"t{d}" for d in range(len(others))],
    )


INDEXING = [
    line("vd,...->...d", aten.embedding, whole="v", linear="weight"),
    derived(_select, aten.select.int),
    derived(_slice, aten.slice.Tensor, aten.narrow),
    derived(_pad, aten.pad, aten.constant_pad_nd),
    derived(_index_select, aten.index_select),
    derived(_index, aten.index.Tensor),
    derived(_index_put, aten.index_put),
    derived(_index_add, aten.index_add, aten.index_copy),
    derived(_index_fill, aten.index_fill.int_Scalar),
    derived(_gather, aten.gather),
    derived(_take_along, aten.take_along_dim),
    derived(_scatter, aten.scatter.src, aten.scatter.value, aten.scatter_add),
    derived(_scatter, aten.scatter_reduce.two),
    derived(_write_part, aten.select_scatter, aten.slice_scatter),
    derived(_one_hot, aten.one_hot),
    line("...,b->...", aten.bucketize.Tensor, whole="b"),
    derived(_search, aten.searchsorted.Tensor),
    derived(_is_in, aten.isin.Tensor_Tensor),
]
