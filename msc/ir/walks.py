"""Walks over the edges of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def ancestors(
    roots: Iterable[fx.Node], within: Callable[[fx.Node], bool] | None = None
) -> set[fx.Node]:
    """The roots and all that they are made of, as far as the way leads through nodes `within`."""
    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found and (within is None or within(node)):
            found.add(node)
            pending += node.all_input_nodes
    return found
