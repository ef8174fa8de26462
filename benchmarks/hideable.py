"""How much of a rank's communication has independent work beside it that could hide it.

A communication is *hideable* for as long as there is computing, in the same graph, that neither
needs it nor is needed by it. The graphs are the rank's step, where the forward or backward of a
chunk is one piece of work, and the flat forward and backward of each chunk. Of a fused collective
its own GEMMs are such work.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from msc.cost import Cluster
from msc.cost.fused import fused_call
from msc.ir.communication import COLLECTIVES, FUSED, POINT_TO_POINT, WAITS, group_of, subgraph
from msc.ir.inline import inline
from msc.runtime.simulate.durations import work_of
from msc.runtime.simulate.result import ClassResult
from msc.runtime.simulate.templates import Templates, module_in_layer

Site = tuple[str, str, str]
"""Mesh axes, kind, and module inside its layer."""


@dataclass(frozen=True)
class SiteHiding:
    """One place of communication over a step: seconds in all, hideable, and left exposed."""

    site: Site
    seconds: float
    hideable: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Of the hideable seconds, those that are hidden."""
        return max(0.0, self.hideable - self.exposed)

    @property
    def reason(self) -> str:
        """Why it is not all hidden."""
        if self.site[1] in FUSED.values():
            return "the first or last part, and what takes longer than its GEMMs"
        if self.hideable < 0.01 * self.seconds:
            return "all work of its chunk needs it or is needed by it"
        if self.hideable < 0.99 * self.seconds:
            return f"independent work for {self.hideable / self.seconds:.0%} of it"
        return "independent work is elsewhere in the step, or done by then"


def hiding(result: ClassResult, step: fx.GraphModule, cluster: Cluster) -> list[SiteHiding]:
    """Every site of a simulated rank, whose step is `step`."""
    independent: dict[Site, list[float]] = defaultdict(list)
    for gm in _graphs(step):
        for site, seconds in _independent(gm, cluster):
            independent[site].append(seconds)
    found = []
    for site, total in result.sites.items():
        each = total.seconds / total.calls
        beside = independent.get(site, [0.0])
        part = sum(min(each, one) for one in beside) / (len(beside) * each) if each else 0.0
        found.append(SiteHiding(site, total.seconds, part * total.seconds, total.exposed_seconds))
    return found


def _graphs(step: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield step
    done: set[int] = set()
    for node in step.graph.find_nodes(op="call_module"):
        graph = subgraph(step, node)
        if id(graph) not in done:
            done.add(id(graph))
            yield inline(graph)


def _independent(gm: fx.GraphModule, cluster: Cluster) -> Iterator[tuple[Site, float]]:
    """Of each communication of a graph, the seconds of computing that it does not depend on."""
    templates = Templates(cluster)
    seconds: list[float] = []
    bits: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.target in WAITS or _kind(node):
            continue
        if node.op == "call_module":
            takes = templates.of(subgraph(gm, node)).seconds
        elif node.op == "call_function" and node.target is not operator.getitem:
            takes = work_of(node).seconds(cluster)
        else:
            continue
        if takes:
            bits[node] = 1 << len(seconds)
            seconds.append(takes)
    before: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        before[node] = bits.get(node, 0)
        for operand in node.all_input_nodes:
            before[node] |= before[operand]
    after: dict[fx.Node, int] = {}
    for node in reversed(gm.graph.nodes):
        after[node] = bits.get(node, 0)
        for user in node.users:
            after[node] |= after[user]
    for node in gm.graph.nodes:
        kind = _kind(node)
        if kind:
            tied = before[node] | after[node]
            free = sum(s for index, s in enumerate(seconds) if not tied >> index & 1)
            if node.target in FUSED:
                free = sum(work.seconds(cluster) for work in fused_call(node).by_rows)
            yield (_axis(node), kind, module_in_layer(node)), free


def _kind(node: fx.Node) -> str | None:
    return COLLECTIVES.get(node.target) or FUSED.get(node.target) or POINT_TO_POINT.get(node.target)


def _axis(node: fx.Node) -> str:
    if node.target in POINT_TO_POINT:
        return "pp"
    return group_of(node)
