"""Predicted memory of a rank, from the liveness of values in its rank graph."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from msc.cost.flops import nbytes
from msc.ir import actions

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def memory_bytes(graph: fx.GraphModule) -> int:
    """Largest sum of bytes live between two nodes of a rank graph.

    Counts parameters, moments, inputs, saved activations, values in transfer and gradients; not
    what a chunk uses only inside. A chunk's results count as memory of their own, also where it
    returns what it was given.
    """
    return _Liveness(graph).peak()


class _Liveness:
    """Storages of a graph: where each is allocated, how large it is, and who uses it last.

    `held[node]` says which storages a node's value consists of, nested as the value is.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.sizes: list[int] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self.held: dict[fx.Node, Any] = {}
        self.end = len(graph.graph.nodes)
        for position, node in enumerate(graph.graph.nodes):
            for operand in node.all_input_nodes:
                self._use(operand, self.end if node.op == "output" else position)
            if node.op != "output":
                self.held[node] = self._value(node, position)
            if node.op == "placeholder":
                self._use(node, self.end)  # the caller holds it

    def peak(self) -> int:
        """The largest sum of sizes of storages that are live together."""
        change: dict[int, int] = defaultdict(int)
        for size, first, last in zip(self.sizes, self.first, self.last, strict=True):
            change[first] += size
            change[last + 1] -= size
        live = most = 0
        for position in sorted(change):
            live += change[position]
            most = max(most, live)
        return most

    def _use(self, node: fx.Node, position: int) -> None:
        for storage in pytree.tree_leaves(self.held[node]):
            if storage is not None:
                self.last[storage] = max(self.last[storage], position)

    def _allocate(self, size: int, position: int) -> int:
        self.sizes.append(size)
        self.first.append(position)
        self.last.append(position)
        return len(self.sizes) - 1

    def _value(self, node: fx.Node, position: int) -> Any:
        converts = node.target is actions.accumulate and node.args[0] is None and node.args[2:]
        if not converts and node.op == "call_function" and node.target in _SHARING:
            return _SHARING[node.target](*self._operands(node))
        if node.target is actions.recv:
            _, _, shapes, dtypes = node.args
            pairs = zip(shapes, dtypes, strict=True)  # type: ignore[arg-type]
            return tuple(self._allocate(math.prod(s) * d.itemsize, position) for s, d in pairs)

        def own(value: Any) -> int | None:
            return self._allocate(nbytes(value), position) if _is_tensor(value) else None

        return pytree.tree_map(own, node.meta.get("val"))

    def _operands(self, node: fx.Node) -> tuple[Any, ...]:
        return fx.map_arg(node.args, self.held.__getitem__)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _accumulated(total: Any, parts: Any, dtype: Any = None) -> Any:
    """A sum reuses the storage of the one before it; the first is the parts themselves."""
    if total is None:
        return tuple(parts)
    pairs = zip(total, parts, strict=True)
    return tuple(part if old is None else old for old, part in pairs)


_SHARING: dict[Any, Callable[..., Any]] = {
    operator.getitem: operator.getitem,
    actions.micro_batch: lambda value, dim, index, count: value,
    actions.accumulate: _accumulated,
    actions.unflatten: lambda bucket, shapes: (bucket,) * len(shapes),
    actions.adamw: lambda parameters, gradients, first, second, *rest: (parameters, first, second),
    actions.send: lambda values, stage, channel: tuple(values),
    actions.wait: lambda token: token,
    _WAIT: lambda value: value,
}
"""Functions whose results are their operands' storages, and which; a token holds its message."""
