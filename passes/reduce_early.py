"""Start each gradient's reduction as soon as the last micro-batch has produced it.

    %b3 = chunk0_backward(..)                        %y = block1_backward(..)       # h.1
    %g  = accumulate(%g2, %b3[1])                    %g1 = accumulate([%g2[5], ..], [%y[0], ..])
    %r  = all_reduce(flatten([%g[0], ..]), 'dp')  -> %r1 = all_reduce(flatten([%g1[0], ..]), 'dp')
    wait(%r)                                         %z = block1_backward_1(..)     # h.0
                                                     wait(%r1)

The last backward of the step is opened up to its blocks, so that a bucket can leave while earlier
layers are still being differentiated (Li et al., VLDB 2020). Numerics: kept bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir import actions
from msc.ir.communication import is_communication, subgraph
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.ir.structure import placeholders

all_reduce = torch.ops._c10d_functional.all_reduce.default


@dataclass(frozen=True)
class ReduceEarly(GraphPass):
    """Open the last backward; start each bucket's reduction where its last gradient is made."""

    name: ClassVar[str] = "reduce-early"
    numerics: ClassVar[str] = BIT_EXACT

    def applies_to(self, name: str) -> bool:
        """Rank graphs."""
        return name.startswith("rank.")

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        found = _last_sum(gm)
        if found is None:
            return 0
        total, call = found
        buckets = [n for n in total.graph.nodes if _is_bucket(n, total)]
        if not buckets:
            return 0
        parts = _open(gm, call)
        for bucket in buckets:
            _move(gm, bucket, total, parts)
        _sum_the_rest(gm, total, parts)
        gm.graph.eliminate_dead_code(_stays)
        return len(buckets)


def _stays(node: fx.Node) -> bool:
    """Whether a node must run though nobody reads it."""
    return node.op in ("placeholder", "output") or is_communication(node)


def _last_sum(gm: fx.GraphModule) -> tuple[fx.Node, fx.Node] | None:
    """The accumulation of the last backward's gradients, and the call of that backward."""
    for node in reversed(gm.graph.nodes):
        if node.target is not actions.accumulate:
            continue
        parts = node.args[1]
        if isinstance(parts, fx.Node) and parts.target is operator.getitem:
            call = parts.args[0]
            if isinstance(call, fx.Node) and call.op == "call_module":
                return node, call
    return None


def _is_bucket(node: fx.Node, total: fx.Node) -> bool:
    """Whether a node is a bucket of gradients of `total` alone, on its way into an all-reduce."""
    if node.target is not actions.flatten or not isinstance(node.args[0], (list, tuple)):
        return False
    items = all(
        isinstance(item, fx.Node) and item.target is operator.getitem and item.args[0] is total
        for item in node.args[0]
    )
    return items and len(node.users) == 1 and next(iter(node.users)).target is all_reduce


def _open(gm: fx.GraphModule, call: fx.Node) -> list[fx.Node]:
    """Put the nodes of a called backward in place of the call; return its parameter gradients."""
    inner = subgraph(gm, call)
    env: dict[fx.Node, fx.Node] = dict(zip(placeholders(inner), call.args, strict=True))  # type: ignore[arg-type]
    with gm.graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = gm.graph.node_copy(node, env.__getitem__)
            env[node].meta = dict(node.meta)
            if node.op == "call_module":
                gm.add_submodule(str(node.target), subgraph(inner, node))
    outputs: Any = inner.graph.output_node().args[0]
    sent, gradients = outputs
    for values in [user for user in call.users if user.args[1] == 0]:
        for user in list(values.users):
            user.replace_all_uses_with(env[sent[user.args[1]]])
    return [env[node] for node in gradients]


def _move(gm: fx.GraphModule, bucket: fx.Node, total: fx.Node, parts: list[fx.Node]) -> None:
    items: Any = bucket.args[0]
    numbers = [item.args[1] for item in items]
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    anchor = max((parts[number] for number in numbers), key=order.__getitem__)
    with gm.graph.inserting_after(anchor):
        bucket_copy = gm.graph.call_function(actions.flatten, ([],))
    bucket_copy.meta = dict(bucket.meta)
    with gm.graph.inserting_before(bucket_copy):
        values = _accumulated(gm, total, parts, numbers)
    bucket_copy.args = (values,)
    (start,) = bucket.users
    with gm.graph.inserting_after(bucket_copy):
        early = gm.graph.call_function(start.target, (bucket_copy, *start.args[1:]))  # type: ignore[arg-type]
    early.meta = dict(start.meta)
    start.replace_all_uses_with(early)
    gm.graph.erase_node(start)
    gm.graph.erase_node(bucket)


def _accumulated(
    gm: fx.GraphModule, total: fx.Node, parts: list[fx.Node], numbers: list[Any]
) -> list[fx.Node]:
    """The sums of some gradients over all micro-batches, as nodes at the insertion point."""
    before, _, *dtype = total.args
    chosen = [parts[number] for number in numbers]
    old: list[fx.Node] | None = None
    if isinstance(before, fx.Node):
        old = [_item(gm, before, number) for number in numbers]
    elif not dtype:
        return chosen
    summed = gm.graph.call_function(actions.accumulate, (old, chosen, *dtype))
    summed.meta = {"val": tuple(total.meta["val"][number] for number in numbers)}
    return [_item(gm, summed, index) for index in range(len(chosen))]


def _item(gm: fx.GraphModule, node: fx.Node, index: int) -> fx.Node:
    item = gm.graph.call_function(operator.getitem, (node, index))
    item.meta = {"val": node.meta["val"][index]}
    return item


def _sum_the_rest(gm: fx.GraphModule, total: fx.Node, parts: list[fx.Node]) -> None:
    """Gradients that nothing reduces in a bucket: sum them where all were summed."""
    picks = [user for user in total.users if user.users]
    if not picks:
        return
    numbers = [pick.args[1] for pick in picks]
    with gm.graph.inserting_before(total):
        values = _accumulated(gm, total, parts, numbers)
    for pick, value in zip(picks, values, strict=True):
        pick.replace_all_uses_with(value)
