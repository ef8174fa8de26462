"""When values of a graph end, which tuples are unpacked at once, and which sums are reused."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

from torch import fx

from msc.ir import actions
from msc.ir.communication import subgraph


def unpacked(module: fx.GraphModule) -> dict[fx.Node, list[fx.Node | None]]:
    """Nodes that yield a tuple and are read only through `getitem`, with the reader of each item.

    Assigning the items at once frees each of them on its own; the tuple would hold all until the
    last is read.
    """
    found: dict[fx.Node, list[fx.Node | None]] = {}
    folded: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node in folded:
            continue  # an item that is a tuple itself: it has its name, and its items use getitem
        if node.op not in ("call_function", "call_module", "call_method") or not node.users:
            continue
        count = _tuple_length(module, node)
        if count is None or not all(_is_item(user, node, count) for user in node.users):
            continue
        readers: list[fx.Node | None] = [None] * count
        for user in node.users:
            if readers[user.args[1]] is not None:
                break  # the same item twice: leave it to getitem
            readers[user.args[1]] = user
        else:
            found[node] = readers
            folded.update(reader for reader in readers if reader is not None)
    return found


def _is_item(user: fx.Node, node: fx.Node, count: int) -> bool:
    return (
        user.op == "call_function"
        and user.target is operator.getitem
        and user.args[0] is node
        and isinstance(user.args[1], int)
        and 0 <= user.args[1] < count
    )


def _tuple_length(module: fx.GraphModule, node: fx.Node) -> int | None:
    if node.op == "call_module":
        result = subgraph(module, node).graph.output_node().args[0]
        return len(result) if isinstance(result, (tuple, list)) else None
    value = node.meta.get("val")
    return len(value) if isinstance(value, (tuple, list)) else None


def last_uses(
    module: fx.GraphModule, items: dict[fx.Node, list[fx.Node | None]]
) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the nodes whose values nothing needs once it has run, in order.

    Values that the graph returns are never among them. A value that nobody reads ends where it is
    computed.
    """
    last: dict[fx.Node, fx.Node] = {}
    folded = {reader: node for node, readers in items.items() for reader in readers if reader}
    for node in module.graph.nodes:
        if node in folded:
            last[node] = folded[node]  # the item exists from where the tuple is unpacked
            continue
        if node not in items:
            last[node] = node
        for operand in node.all_input_nodes:
            last[operand] = node
    ends: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, user in last.items():
        if user.op != "output" and node.op != "output":
            ends[user].append(node)
    return ends


def reuses_total(node: fx.Node) -> bool:
    """Whether an `accumulate` node may add into its total.

    It may where the total is the result of an earlier addition that nothing else reads. The first
    summands themselves are not ours: one tensor may be the gradient of two parameters.
    """
    total: Any = node.args[0]
    if isinstance(total, fx.Node):
        return _is_sum(total) and set(total.users) == {node}
    return all(
        isinstance(item, fx.Node)
        and item.target is operator.getitem
        and isinstance(item.args[0], fx.Node)
        and _is_sum(item.args[0])
        and set(item.users) == {node}
        and _items_differ(item.args[0])
        for item in total
    )


def _is_sum(node: fx.Node) -> bool:
    return node.target is actions.accumulate and node.args[0] is not None


def _items_differ(node: fx.Node) -> bool:
    read = [user.args[1] for user in node.users if user.target is operator.getitem]
    return len(read) == len(node.users) and len(set(read)) == len(read)
