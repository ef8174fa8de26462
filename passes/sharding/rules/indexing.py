"""Ops that pick, place or pad elements along a dim. The dim stays whole, all others are free."""

from __future__ import annotations

from typing import Any

import torch
from torch import ops

from msc.passes.sharding.rule import Dim, LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import (
    Bound,
    dim_of,
    dims_of,
    table_line,
)
from msc.passes.sharding.rules.notation import line

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


def _index(bound: Bound) -> Rule | None:
    """x[i, :, j]: indexed dims whole; the (broadcast) dims of the indices stand in their place.

    They stand at the front if the indexed dims are not neighbours. None for a boolean index: the
    result's length depends on data.
    """
    shape = bound.shape("self")
    entries = list(bound.values["indices"])
    tensors = bound.tensors("indices")
    if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors):
        return None
    indexed = [d for d, entry in enumerate(entries) if entry is not None]
    common = torch.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    picked = dims_of(common, "i")
    dims = dims_of(shape)
    kept = [d for d in range(len(shape)) if d not in indexed]
    neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    front = indexed[0] if neighbours else 0
    result = [*(dims[d] for d in kept[:front]), *picked, *(dims[d] for d in kept[front:])]
    return bound.rule(
        {"self": tuple(dims), "indices": [_broadcast(t, picked) for t in tensors]},
        [tuple(result)],
        whole=[f"d{d}" for d in indexed],
        linear=[["self"]],
    )


def _broadcast(tensor: torch.Tensor, common: list[Dim]) -> tuple[Dim, ...]:
    own = common[len(common) - tensor.dim() :]
    lengths = [1 if length == 1 else None for length in tensor.shape]
    empty: Dim = ((),)
    return tuple(empty if one else dim for dim, one in zip(own, lengths, strict=True))


def _gather(bound: Bound) -> Rule:
    """Other dims are shared where the index covers them; else the rest is never read."""
    shape, index_shape = bound.shape("self"), bound.shape("index")
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
        {"self": tuple(source), "index": tuple(index)},
        [tuple(index)],
        whole=whole,
        linear=[["self"]],
    )


def _one_hot(bound: Bound) -> Rule | None:
    """None where the number of classes depends on data."""
    if bound.values["num_classes"] < 0:
        return None
    dims = dims_of(bound.shape("self"))
    classes = dim_of("classes", bound.result_shape()[-1])
    return bound.rule({"self": tuple(dims)}, [(*dims, classes)], whole=["classes"])


def _scatter(bound: Bound) -> Rule | None:
    """Dims other than `dim` are shared, if index, source and result agree on them; else whole."""
    shape, index_shape = bound.shape("self"), bound.shape("index")
    dim = bound.dim()
    dims, index = dims_of(shape), dims_of(index_shape, "i")
    operands: dict[str, Any] = {}
    source = dims_of(bound.shape("src"), "s") if bound.positions.get("src") else []
    whole = [f"{prefix}{dim}" for prefix in "dis"]
    for d in range(len(shape)):
        if d == dim:
            continue
        if shape[d] == index_shape[d] and (not source or source[d] == dim_of(f"s{d}", shape[d])):
            index[d] = dims[d]
            if source:
                source[d] = dims[d]
        else:
            whole += [f"d{d}", f"i{d}", f"s{d}"]
    operands = {"self": tuple(dims), "index": tuple(index)}
    if source:
        operands["src"] = tuple(source)
    adds = bound.call.target is aten.scatter_add.default
    zero = bound.values.get("value") == 0
    joint = ["self", "src"] if source else ["self"]
    return bound.rule(
        operands, [tuple(dims)], whole=whole, linear=[joint] if adds or source or zero else []
    )


INDEXING = [
    line("vd,...->...d", aten.embedding, whole="v", linear="weight"),
    table_line(_select, [aten.select.int]),
    table_line(_slice, [aten.slice.Tensor, aten.narrow]),
    table_line(_pad, [aten.pad, aten.constant_pad_nd]),
    table_line(_index_select, [aten.index_select]),
    table_line(_index, [aten.index.Tensor]),
    table_line(_gather, [aten.gather]),
    table_line(_scatter, [aten.scatter.src, aten.scatter.value, aten.scatter_add]),
    table_line(_one_hot, [aten.one_hot]),
]
