"""Values that depend on no placeholder, and their numbers at batch size 2.

Masks and index grids are such values. They are computed for real, on the CPU, at a batch size that
is small and still shows whether the samples differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from msc.ir.torch_private import OpOverload

SIZES_AT_BATCH_TWO = "sizes_at_batch_two"
"""Node metadata: {position: number} of the sizes among the flattened arguments of a call that
depend on the batch, at batch size 2.

The capture writes the key, and `identity_index`, the last pass that needs it, removes it.
"""

_MAX_ELEMENTS = 1 << 30


class InputFree:
    """Finds and computes the values of a graph that depend on no placeholder."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._free: set[fx.Node] = set()
        self._known: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "call_function" and not _random(node):
                if all(source in self._free for source in node.all_input_nodes):
                    self._free.add(node)

    def __contains__(self, node: Any) -> bool:
        return node in self._free

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The numbers of a node at batch size 2; None if it is not input-free, or not computable.

        A value is not computable if it is huge, or if the code of the model holds for larger
        batches only.
        """
        if node not in self._free or _elements(node) > _MAX_ELEMENTS:
            return None
        if node not in self._known:
            try:
                self._known[node] = self._compute(node)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                self._known[node] = None
        result = self._known[node]
        return result if isinstance(result, torch.Tensor) else None

    def _compute(self, node: fx.Node) -> Any:
        order = self._ancestors(node)
        readers = {each: sum(each in _sources(user) for user in order) for each in order}
        values: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for each in order:
                args, kwargs = fx.map_arg(_arguments(each), values.__getitem__)
                values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
                for source in set(_sources(each)):
                    readers[source] -= 1
                    if not readers[source]:
                        del values[source]  # masks are large
        return values[node]

    def _ancestors(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that `node` is computed from and itself, in an order to compute them in."""
        order: list[fx.Node] = []
        seen: set[fx.Node] = set()
        stack: list[tuple[fx.Node, bool]] = [(node, False)]
        while stack:
            each, ready = stack.pop()
            if ready:
                order.append(each)
            elif each not in seen:
                seen.add(each)
                stack.append((each, True))
                stack.extend((source, False) for source in _sources(each))
        return order


def forget_batch_two(gm: fx.GraphModule) -> None:
    """Remove the metadata that only this module reads."""
    for node in gm.graph.nodes:
        node.meta.pop(SIZES_AT_BATCH_TWO, None)


def _arguments(node: fx.Node) -> Any:
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    for position, number in node.meta.get(SIZES_AT_BATCH_TWO, {}).items():
        leaves[position] = number
    return pytree.tree_unflatten(leaves, structure)


def _sources(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def _elements(node: fx.Node) -> int:
    """Elements at batch size 2, at most: those of the last two dims, twice."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return 2 * value.shape[-2:].numel()


def _random(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and (
        torch.Tag.nondeterministic_seeded in node.target.tags
    )
