"""Write one op in the place of a collective and its GEMMs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.ir.values import carry
from msc.passes.fuse_collectives.places import Gather, Place, Reduce


def fuse(place: Place) -> fx.Node:
    """Put one op in a place that has no reason against it; the new node."""
    if isinstance(place, Gather):
        return _fuse_gather(place)
    assert isinstance(place, Reduce)
    return _fuse_reduce(place)


def _fuse_gather(place: Gather) -> fx.Node:
    readers = place.readers
    graph = place.start.graph
    first = next(node for node in graph.nodes if node in place.gathered.users)
    args = (
        place.start.args[0],
        place.dim,
        [each.weight for each in place.products],
        [each.bias for each in place.products],
        [each.transposed for each in place.products],
        [each.other for each in place.over_rows],
        [each.is_first for each in place.over_rows],
        place.keep,
        place.size,
        place.group,
    )
    with graph.inserting_before(first):
        fused = _call(graph, ALL_GATHER_MATMUL, args)
        carry([*readers, place.start], fused)
        items = [_item(fused, position) for position in range(len(fused.meta["val"]))]
    for old, new in zip([*readers, *[place.gathered] * place.keep], items, strict=True):
        new.meta = {**old.meta, "val": new.meta["val"]}
        old.replace_all_uses_with(new)
    _erase([*readers, *reversed(place.chain), place.start])
    return fused


def _fuse_reduce(place: Reduce) -> fx.Node:
    graph = place.start.graph
    args = (
        place.x,
        place.weight,
        place.add,
        place.transposed,
        place.dim,
        place.size,
        place.group,
    )
    with graph.inserting_before(place.start):
        fused = _call(graph, MATMUL_REDUCE_SCATTER, args)
    fused.meta = {**place.result.meta, "val": fused.meta["val"]}
    carry([place.gemm, place.start], fused)
    place.result.replace_all_uses_with(fused)
    _erase([*reversed(place.chain), place.start, *reversed(place.before)])
    return fused


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    with torch.no_grad():
        value = target(*fx.map_arg(args, lambda operand: operand.meta["val"]))
    node.meta["val"] = tuple(value) if isinstance(value, list) else value
    return node


def _item(fused: fx.Node, position: int) -> fx.Node:
    node = fused.graph.call_function(operator.getitem, (fused, position))
    node.meta["val"] = fused.meta["val"][position]
    return node


def _erase(nodes: list[fx.Node]) -> None:
    """Erase nodes that nothing reads any more, readers first."""
    for node in nodes:
        node.graph.erase_node(node)
