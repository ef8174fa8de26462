"""Wait for reductions as soon as they have landed, and let only so many transfers be on their way.

    %r1 = all_reduce(%f1); %r2 = ..; %r3 = ..      %r1 = all_reduce(%f1); %r2 = ..
                                             ->    %w1 = wait(%r1)
    %w1 = wait(%r1)                                %r3 = all_reduce(%f3)

A reduction holds its operand and its result until it is waited for, so that gradients that are all
waited for at the end of the step are there twice. It is waited for before the first later one of
its group that starts when it has landed by the model: the rank's computing, without the times in
which it waits for others, against the group's transfers one after the other. So nothing waits
longer than before. Beyond the limit in number, which is far above what a step hides, a reduction is
waited for at once and a gather starts later. Groups over pipeline stages are left alone: there one
stage's wait could hold up what the other needs. Numerics: kept bit for bit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from msc.cost.collectives import collective_seconds
from msc.cost.flops import nbytes
from msc.cost.topology import group_spans
from msc.ir.communication import COLLECTIVES, WAITS, group_of, moved_tensors, subgraph
from msc.ir.groups import Group
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.block_time import block_time
from msc.passes.compilation import Compilation, Settings

_c10d = torch.ops._c10d_functional
_REDUCTIONS = {_c10d.all_reduce.default, _c10d.reduce_scatter_tensor.default}


@dataclass(frozen=True)
class WaitEarly(GraphPass):
    """Wait for reductions earlier; start gathers beyond the limit later."""

    name: ClassVar[str] = "wait-early"
    numerics: ClassVar[str] = BIT_EXACT

    def applies_to(self, name: str) -> bool:
        """Rank graphs."""
        return name.startswith("rank.")

    def run(self, gm: fx.GraphModule, unit: Compilation) -> int:
        gathers: dict[str, list[fx.Node]] = defaultdict(list)
        for node in gm.graph.nodes:
            if _of_one_stage(node) and node.target not in _REDUCTIONS:
                gathers[group_of(node)].append(node)
        limit = unit.settings.in_flight
        moved = sum(_start_later(starts, limit) for starts in gathers.values())
        return moved + _wait_when_landed(gm, unit.settings)


def _of_one_stage(node: fx.Node) -> bool:
    """Whether a node starts a collective of ranks of one pipeline stage, which run one program."""
    return node.target in COLLECTIVES and "pp" not in Group.parse(group_of(node)).axes


def _wait(start: fx.Node) -> fx.Node:
    (wait,) = (user for user in start.users if user.target in WAITS)
    return wait


def _start_later(starts: Sequence[fx.Node], limit: int) -> int:
    """Move each start behind the wait of the one `limit` before it, where that comes later."""
    moved = 0
    for before, start in zip(starts, starts[limit:], strict=False):
        landed = _wait(before)
        if start < landed < _wait(start):
            operands = [n for n in start.all_input_nodes if n.op != "placeholder"]
            for node in (start, *(n for n in operands if set(n.users) == {start})):
                landed.append(node)  # each right behind it, so what is made first is moved last
            moved += 1
    return moved


def _wait_when_landed(gm: fx.GraphModule, settings: Settings) -> int:
    """Wait for each reduction before the first later one at whose start it has landed."""
    clock = 0.0
    free: defaultdict[str, float] = defaultdict(float)  # when a group has ended what it was given
    flying: defaultdict[str, deque[tuple[fx.Node, float]]] = defaultdict(deque)
    times: dict[int, float] = {}
    moved = 0
    for node in list(gm.graph.nodes):
        if node.op == "call_module":
            clock += _time(subgraph(gm, node), settings, times)
        elif not _of_one_stage(node):
            continue
        else:
            group = group_of(node)
            free[group] = max(clock, free[group]) + _transfer(node, settings)
            if node.target in _REDUCTIONS:
                own = flying[group]
                while own and (own[0][1] <= clock or len(own) >= settings.in_flight):
                    wait = _wait(own.popleft()[0])
                    if node < wait:
                        node.prepend(wait)
                        moved += 1
                own.append((node, free[group]))
    return moved


def _time(gm: fx.GraphModule, settings: Settings, known: dict[int, float]) -> float:
    """The modelled time of a graph, and of the graphs that it calls."""
    if id(gm) not in known:
        called = [subgraph(gm, node) for node in gm.graph.nodes if node.op == "call_module"]
        own = block_time(list(gm.graph.nodes), settings)
        known[id(gm)] = own + sum(_time(each, settings, known) for each in called)
    return known[id(gm)]


def _transfer(start: fx.Node, settings: Settings) -> float:
    """What a collective takes, in the unit of `settings.cost`."""
    kind, group = COLLECTIVES[start.target], Group.parse(group_of(start))
    payload = max(map(nbytes, moved_tensors(start)))
    cluster, mesh = settings.cost.cluster, settings.mesh
    if cluster is None:
        return settings.cost.collective(kind, payload, group.size(mesh))
    spans = group_spans(mesh, group, range(mesh.axis_size("pp")), cluster.devices_per_node)
    return max(collective_seconds(cluster, kind, payload, span) for span in spans)
