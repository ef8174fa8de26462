"""Start each gradient's reduction as soon as the last micro-batch has produced it.

    %b3 = chunk0_backward(..)                        %y = block1_backward(..)       # h.1
    %g  = accumulate(%g2, %b3[1])                    %g1 = accumulate([%g2[5], ..], [%y[0], ..])
    %r  = all_reduce(flatten([%g[0], ..]), 'dp')  -> %r1 = all_reduce(flatten([%g1[0], ..]), 'dp')
    wait(%r)                                         %z = block1_backward_1(..)     # h.0
                                                     wait(%r1)

The last backward of each chunk is opened up to its blocks, so that a bucket can leave while earlier
layers are still being differentiated (Li et al., VLDB 2020). Of the step's last backward the first
and the last layer are opened up to their ops: where gradients are made faster than they travel, the
sooner the first bucket leaves the sooner the last one ends, and where they travel faster, only what
the last layer makes is left when the computing ends. Numerics: kept bit for bit.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir import actions
from msc.ir.communication import group_of, is_communication, subgraph
from msc.ir.groups import Group
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.ir.walks import num_reads
from msc.passes.block_time import block_time
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Compilation, Settings
from msc.passes.open_call import open_call

_c10d = torch.ops._c10d_functional
_REDUCTIONS = {_c10d.all_reduce.default, _c10d.reduce_scatter_tensor.default}
_FLATTENS = {actions.flatten, actions.flatten_shards}
_SMALL = 0.1
"""What takes less than this part of the longest gradient of a bucket does not keep the bucket."""


@dataclass(frozen=True)
class ReduceEarly(GraphPass):
    """Open the last backwards; start each bucket's reduction where its last gradient is made."""

    name: ClassVar[str] = "reduce-early"
    numerics: ClassVar[str] = BIT_EXACT

    def applies_to(self, name: str) -> bool:
        """Rank graphs."""
        return name.startswith("rank.")

    def run(self, gm: fx.GraphModule, unit: Compilation) -> int:
        moved = 0
        starts = Counter(group_of(n) for n in gm.graph.nodes if n.target in _REDUCTIONS)
        sums = _last_sums(gm)
        last = max((call for _, call in sums), default=None)
        for total, call in sums:
            buckets = [n for n in gm.graph.nodes if _is_bucket(n, total, starts)]
            if not buckets:
                continue
            _, parts = open_call(gm, call)
            if call is last:
                numbers = {number for bucket in buckets for number in _numbers(bucket)}
                parts = _opened_at_its_ends(gm, parts, numbers, unit.settings)
            for bucket in buckets:
                _make_sooner([parts[number] for number in _numbers(bucket)], unit.settings)
                _move(gm, bucket, total, parts)
            _sum_the_rest(gm, total, parts)
            moved += len(buckets)
        if moved:
            gm.graph.eliminate_dead_code(_stays)
        return moved


def _stays(node: fx.Node) -> bool:
    """Whether a node must run though nobody reads it."""
    return node.op in ("placeholder", "output") or is_communication(node)


def _last_sums(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Of each chunk, the accumulation of its last gradients, and the call that gives them."""
    found: dict[Any, tuple[fx.Node, fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.target is not actions.accumulate:
            continue
        parts = node.args[1]
        if isinstance(parts, fx.Node) and parts.target is operator.getitem:
            call = parts.args[0]
            if isinstance(call, fx.Node) and call.op == "call_module" and _gives_sums(gm, call):
                found[call.target] = node, call
    return list(found.values())


def _gives_sums(gm: fx.GraphModule, call: fx.Node) -> bool:
    """Whether a backward gives gradients of this rank only; others are reduced inside of it."""
    outputs: Any = subgraph(gm, call).graph.output_node().args[0]
    return len(outputs) == 2


def _is_bucket(node: fx.Node, total: fx.Node, starts: Mapping[str, int]) -> bool:
    """Whether a node is a bucket of gradients of `total` alone, on its way to be reduced.

    starts: how often each group reduces. Stages that share several buckets make their gradients in
    different orders, so those keep the one order that they have at the end.
    """
    if node.target not in _FLATTENS or not isinstance(node.args[0], (list, tuple)):
        return False
    if num_reads(node) != 1 or next(iter(node.users)).target not in _REDUCTIONS:
        return False
    group = group_of(next(iter(node.users)))
    if starts[group] > 1 and "pp" in Group.parse(group).axes:
        return False
    return all(
        isinstance(item, fx.Node) and item.target is operator.getitem and item.args[0] is total
        for item in node.args[0]
    )


def _opened_at_its_ends(
    gm: fx.GraphModule, parts: Sequence[fx.Node], numbers: Iterable[int], settings: Settings
) -> Sequence[fx.Node]:
    """Open the first and the last calls that give some of a backward's results; those results.

    From each end as many as take as long as the longest call: a head or an embedding is short.
    """
    found = {node.args[0] for node in map(parts.__getitem__, numbers) if _is_result(node)}
    calls = sorted(node for node in found if isinstance(node, fx.Node))
    times = [block_time(list(subgraph(gm, call).graph.nodes), settings) for call in calls]
    ends = [*_first(calls, times), *_first(calls[::-1], times[::-1])]
    for call in dict.fromkeys(ends):
        picked: dict[fx.Node, Any] = {item: item.args[1] for item in call.users}
        results = open_call(gm, call)
        parts = [results[picked[part]] if part in picked else part for part in parts]
    return parts


def _first(calls: Sequence[fx.Node], times: Sequence[float]) -> Sequence[fx.Node]:
    """The first calls, up to the time of the longest."""
    for count, total in enumerate(itertools.accumulate(times), start=1):
        if total >= max(times):
            return calls[:count]
    return calls


def _is_result(node: fx.Node) -> bool:
    """Whether a node is a result of a call."""
    of = node.args[0] if node.target is operator.getitem else None
    return isinstance(of, fx.Node) and of.op == "call_module"


def _numbers(bucket: fx.Node) -> list[int]:
    """Which gradients of its chunk a bucket holds."""
    items: Any = bucket.args[0]
    return [item.args[1] for item in items]


def _make_sooner(gradients: Sequence[fx.Node], settings: Settings) -> None:
    """Move what is quickly made, such as a bias' gradient, right behind what it is made of.

    It may stand where it hides a collective of its block, with the bucket behind it.
    """
    slow = _SMALL * max(_cost(node, settings) for node in gradients)

    def quick(node: fx.Node) -> bool:
        moves = node.op == "call_function" and not is_communication(node)
        return moves and _cost(node, settings) < slow

    for gradient in filter(quick, gradients):
        chain = [gradient]
        while (own := chain[-1].all_input_nodes) and len(own) == 1 and len(own[0].users) == 1:
            if not quick(own[0]):
                break
            chain.append(own[0])
        made_of = chain[-1].all_input_nodes
        if made_of and (anchor := max(made_of)).op != "placeholder":
            for node in reversed(chain):
                anchor.append(node)
                anchor = node


def _cost(node: fx.Node, settings: Settings) -> float:
    return call_cost(node, settings) if node.op == "call_function" else 0.0


def _move(gm: fx.GraphModule, bucket: fx.Node, total: fx.Node, parts: Sequence[fx.Node]) -> None:
    numbers = _numbers(bucket)
    made_of = [parts[number] for number in numbers]
    if isinstance(total.args[0], fx.Node):
        made_of.append(total.args[0])  # which a split backward makes after the first parts
    anchor = max(made_of)
    with gm.graph.inserting_after(anchor):
        bucket_copy = gm.graph.call_function(bucket.target, ([], *bucket.args[1:]))  # type: ignore[arg-type]
    bucket_copy.meta = dict(bucket.meta)
    with gm.graph.inserting_before(bucket_copy):
        values = _accumulated(gm, total, parts, numbers)
    bucket_copy.args = (values, *bucket.args[1:])
    (start,) = bucket.users
    with gm.graph.inserting_after(bucket_copy):
        early = gm.graph.call_function(start.target, (bucket_copy, *start.args[1:]))  # type: ignore[arg-type]
    early.meta = dict(start.meta)
    start.replace_all_uses_with(early)
    gm.graph.erase_node(start)
    gm.graph.erase_node(bucket)


def _accumulated(
    gm: fx.GraphModule, total: fx.Node, parts: Sequence[fx.Node], numbers: list[Any]
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


def _sum_the_rest(gm: fx.GraphModule, total: fx.Node, parts: Sequence[fx.Node]) -> None:
    """Gradients that nothing reduces in a bucket: sum them where all were summed."""
    picks = [user for user in total.users if user.users]
    if not picks:
        return
    numbers = [pick.args[1] for pick in picks]
    with gm.graph.inserting_before(total):
        values = _accumulated(gm, total, parts, numbers)
    for pick, value in zip(picks, values, strict=True):
        pick.replace_all_uses_with(value)
