"""Walks over the edges of a graph, and counts of them."""

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


def num_reads(node: fx.Node) -> int:
    """How often a value is read: a node that reads it twice, as `x + x` does, counts twice.

    `node.users` has such a node once.
    """
    found = 0

    def count(operand: fx.Node) -> fx.Node:
        nonlocal found
        found += operand is node
        return operand

    for user in node.users:
        fx.map_arg((user.args, user.kwargs), count)
    return found


def is_before(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node of a graph comes before another one; its output comes behind all."""
    return node.op != "output" and node < other
