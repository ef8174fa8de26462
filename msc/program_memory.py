"""Predicted memory of a rank, from the liveness of values in its rank graph."""

from __future__ import annotations

import operator

from torch import fx

from msc.cost.flops import nbytes
from msc.ir import actions
from msc.ir.values import tensors_of

_VIEWS = {actions.micro_batch, actions.unflatten, actions.adamw}


def memory_bytes(graph: fx.GraphModule) -> int:
    """Largest sum of bytes live between two nodes of a rank graph.

    Counts parameters, moments, inputs, saved activations, values in transfer and gradients; not
    what a chunk uses only inside.
    """
    order = list(graph.graph.nodes)
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(order):
        for operand in node.all_input_nodes:
            last[operand] = position
    held = sum(_bytes(n) for n in order if n.op == "placeholder")
    ends: dict[int, int] = {}
    peak = live = held
    for position, node in enumerate(order):
        if node.op in ("placeholder", "output") or not _owns(node):
            live -= ends.pop(position, 0)
            continue
        size = _bytes(node)
        live += size
        peak = max(peak, live)
        ends[last.get(node, position)] = ends.get(last.get(node, position), 0) + size
        live -= ends.pop(position, 0)
    return peak


def _owns(node: fx.Node) -> bool:
    """Whether a node's value is storage of its own: a leaf of a call, not a tuple or a view."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        while isinstance(source, fx.Node) and source.target is operator.getitem:
            source = source.args[0]
        if not isinstance(source, fx.Node) or source.target in _VIEWS:
            return False
        # a sum reuses the storage of the one before it
        if source.target is actions.accumulate and source.args[0] is not None:
            return False
        return True
    return node.target not in _VIEWS


def _bytes(node: fx.Node) -> int:
    return sum(nbytes(tensor) for tensor in tensors_of(node))
