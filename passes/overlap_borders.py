"""Let work of one block run beside the collectives of the next, across the border between them.

    %g2 = block1_backward(..)   # h.1          %e = across0(..)   # E of h.1
    %g1 = block1_backward(..)   # h.0    ->    %f = across1(..)   # L of h.1 and E of h.0
    %g0 = block0_backward(..)                  %g = across2(..)   # L of h.0 and all of block 0

In its backward a block begins with a gather of the gradient that comes in, which all that follows
needs; weight gradients of the block before could run meanwhile. So a called graph is cut into what
the next call needs (early, E) and what can wait (late, L), and L becomes part of the graph that the
next call runs, in the order that `msc.passes.overlap` finds. Calls whose graphs and cuts are equal
share one graph, so that the work does not grow with the number of layers. As little is late as
makes the modelled time shortest, since what it reads lives longer.

Numerics: kept bit for bit.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from msc.ir.communication import is_communication, subgraph
from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.structure import output_nodes, placeholders
from msc.ir.torch_private import lazy_graph_module
from msc.ir.walks import ancestors
from msc.passes.block_time import block_time
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Compilation, Settings
from msc.passes.overlap import reorder

_GAIN = 0.999  # a cut must save so much of the modelled time, or more


@dataclass(frozen=True)
class OverlapBorders(UnitPass):
    """Move late work of a block's backward into the graph that the next call runs."""

    name: ClassVar[str] = "overlap-borders"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        templates = _Templates(unit.settings)
        moved = 0
        for variant in unit.variants:
            for chunk in variant.chunks:
                if chunk.backward is None:
                    continue
                found, cuts = _across(chunk.backward, templates)
                if cuts:
                    moved += cuts
                    chunk.backward = found
                    unit.graphs[f"chunk{chunk.index}.backward{variant.suffix}"] = found
        for number, gm in enumerate(templates.merged.values()):
            unit.graphs[f"block.across{number}.backward"] = gm
        return moved


@dataclass(frozen=True)
class _Cut:
    """A called graph in two parts.

    late: nodes that the graph of the next call runs; reads: what they read of the rest; kept: those
    of `reads` that are no placeholders.
    """

    gm: fx.GraphModule
    late: tuple[fx.Node, ...] = ()
    reads: tuple[fx.Node, ...] = ()

    @property
    def kept(self) -> list[fx.Node]:
        return [node for node in self.reads if node.op != "placeholder"]

    @property
    def early(self) -> list[fx.Node]:
        late = set(self.late)
        return [n for n in self.gm.graph.nodes if n.op == "call_function" and n not in late]

    def results(self, late: bool) -> list[int]:
        """The numbers of the results that the late part gives, or the early one."""
        nodes = set(self.late)
        return [i for i, node in enumerate(output_nodes(self.gm)) if (node in nodes) == late]


class _Templates:
    """Cuts of pairs of graphs, and the graphs that calls run then; equal ones are made once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cuts: dict[tuple[int, int, frozenset[int]], _Cut] = {}
        self.merged: dict[tuple[Any, ...], fx.GraphModule] = {}

    def cut(self, gm: fx.GraphModule, following: fx.GraphModule, needed: frozenset[int]) -> _Cut:
        """The best cut of a graph before a call of another; results in `needed` must be early.

        Nothing is late where that saves no time.
        """
        key = (id(gm), id(following), needed)
        if key not in self.cuts:
            self.cuts[key] = self._best(gm, following, needed)
        return self.cuts[key]

    def _best(self, gm: fx.GraphModule, following: fx.GraphModule, needed: frozenset[int]) -> _Cut:
        nothing = _Cut(gm)
        if not any(is_communication(node) for node in following.graph.nodes):
            return nothing
        best, least = nothing, self._seconds(nothing, following) * _GAIN
        for late in self._suffixes(_may_wait(gm, needed)):
            cut = _Cut(gm, late, _reads(gm, late))
            seconds = self._seconds(cut, following)
            if seconds < least:
                best, least = cut, seconds * _GAIN
        return best

    def _suffixes(self, nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
        """The ends of a list of nodes that begin with one that takes time, the shortest first."""
        for start in reversed(range(len(nodes))):
            if call_cost(nodes[start], self.settings) > 0:
                yield tuple(nodes[start:])

    def _seconds(self, cut: _Cut, following: fx.GraphModule) -> float:
        early = block_time(cut.early, self.settings)
        if not cut.late:
            return early + block_time(_Cut(following).early, self.settings)
        return early + block_time(_Cut(self._merge(cut, _Cut(following))).early, self.settings)

    def graph(self, before: _Cut | None, own: _Cut) -> fx.GraphModule:
        """What a call runs: the late part of the call before, and its own early part."""
        key = (None if before is None else (id(before.gm), before.late), id(own.gm), own.late)
        if key not in self.merged:
            self.merged[key] = self._merge(before or _Cut(own.gm), own)
        return self.merged[key]

    def _merge(self, before: _Cut, own: _Cut) -> fx.GraphModule:
        """Placeholders: what `before` reads, and those of `own`.

        Results: the late ones of `before`, the early ones of `own`, and what its late part reads.
        """
        graph = fx.Graph()
        late: dict[fx.Node, fx.Node] = {}
        for node in before.reads:
            late[node] = graph.placeholder(f"before_{node.name}")
            late[node].meta = _argument(node)
        early: dict[fx.Node, fx.Node] = {}
        for node in placeholders(own.gm):
            early[node] = graph.placeholder(node.name)
            early[node].meta = dict(node.meta)
        for node in before.late:
            late[node] = graph.node_copy(node, late.__getitem__)
            late[node].meta = {**node.meta, "of_call_before": True}
        for node in own.early:
            early[node] = graph.node_copy(node, early.__getitem__)
            early[node].meta = dict(node.meta)
        ends, starts = output_nodes(before.gm), output_nodes(own.gm)
        results = [late[ends[i]] for i in before.results(late=True)]
        results += [early[starts[i]] for i in own.results(late=False)]
        graph.output((*results, *(early[node] for node in own.kept)))
        gm = lazy_graph_module({}, graph)
        reorder(gm, self.settings)
        return gm


def _argument(node: fx.Node) -> dict[str, Any]:
    if node.op == "placeholder":
        return dict(node.meta)
    return {"val": node.meta["val"], "kind": "saved", "name": node.name}


def _may_wait(gm: fx.GraphModule, needed: frozenset[int]) -> list[fx.Node]:
    """The nodes that no needed result and no communication reads, in order."""
    results = output_nodes(gm)
    pending = [node for index, node in enumerate(results) if index in needed]
    pending += [node for node in gm.graph.nodes if is_communication(node)]
    early = ancestors(pending)
    for node in gm.graph.nodes:  # so that the other items need not be kept with it
        if node.target is operator.getitem and node.args[0] in early:
            early.add(node)
    return [n for n in gm.graph.nodes if n.op == "call_function" and n not in early]


def _reads(gm: fx.GraphModule, late: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    inside = set(late)
    read = {operand for node in late for operand in node.all_input_nodes} - inside
    return tuple(node for node in gm.graph.nodes if node in read)


@dataclass
class _Call:
    """A call of a chunk's graph and what becomes of it."""

    node: fx.Node
    gm: fx.GraphModule
    needed: frozenset[int]
    cut: _Cut = field(init=False)


def _across(backward: fx.GraphModule, templates: _Templates) -> tuple[fx.GraphModule, int]:
    """A chunk's backward with late work moved, and how many calls have some."""
    calls = [
        _Call(node, subgraph(backward, node), _needed(node))
        for node in backward.graph.nodes
        if node.op == "call_module"
    ]
    if not calls:
        return backward, 0
    for call, following in itertools.pairwise(calls):
        call.cut = templates.cut(call.gm, following.gm, call.needed)
    calls[-1].cut = _Cut(calls[-1].gm)
    count = sum(bool(call.cut.late) for call in calls)
    return (_Rebuild(backward, calls, templates).run() if count else backward), count


def _needed(call: fx.Node) -> frozenset[int]:
    """The results of a call that something else than the graph's output reads."""
    return frozenset(
        int(item.args[1])  # type: ignore[arg-type]
        for item in call.users
        if any(user.op != "output" for user in item.users)
    )


class _Rebuild:
    """A chunk's graph again, whose calls run merged graphs."""

    def __init__(self, gm: fx.GraphModule, calls: Sequence[_Call], templates: _Templates) -> None:
        self.gm = gm
        self.calls = {call.node: call for call in calls}
        self.templates = templates
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.results: dict[tuple[fx.Node, int], fx.Node] = {}
        self.before: tuple[_Call, dict[fx.Node, fx.Node]] | None = None

    def run(self) -> fx.GraphModule:
        for node in self.gm.graph.nodes:
            if node in self.calls:
                self._call(self.calls[node])
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self._value))
            elif node.target is not operator.getitem or node.args[0] not in self.calls:
                self.nodes[node] = self.graph.node_copy(node, self._value)
        found = lazy_graph_module(self.modules, self.graph)
        found.meta = dict(self.gm.meta)
        return found

    def _value(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem and node.args[0] in self.calls:
            return self.results[node.args[0], node.args[1]]  # type: ignore[index]
        return self.nodes[node]

    def _call(self, call: _Call) -> None:
        before, had = self.before or (None, {})
        cut = None if before is None or not before.cut.late else before.cut
        own = [self._value(argument) for argument in call.node.args]  # type: ignore[arg-type]
        given = dict(zip(placeholders(call.gm), own, strict=True))
        reads = [had[node] for node in cut.reads] if cut is not None else []
        if cut is None and not call.cut.late:
            gm, name = call.gm, str(call.node.target)
        else:
            gm = self.templates.graph(cut, call.cut)
            name = self._name(gm)
        self.modules[name] = gm
        node = self.graph.call_module(name, (*reads, *own))
        values = output_nodes(gm)
        node.meta = {**call.node.meta, "val": tuple(value.meta["val"] for value in values)}
        if cut is not None and before is not None:
            node.meta["module_path_before"] = before.node.meta.get("module_path", "")
        items = iter(range(len(values)))
        if cut is not None and before is not None:
            for index in cut.results(late=True):
                self._result(before, index, node, next(items))
        for index in call.cut.results(late=False):
            self._result(call, index, node, next(items))
        for kept in call.cut.kept:
            given[kept] = self._item(node, next(items), {"val": kept.meta["val"]})
        self.before = call, given

    def _name(self, gm: fx.GraphModule) -> str:
        made = list(self.templates.merged.values())
        return f"across{next(i for i, each in enumerate(made) if each is gm)}_backward"

    def _result(self, call: _Call, index: int, node: fx.Node, position: int) -> None:
        meta = next((i.meta for i in call.node.users if i.args[1] == index), None)
        if meta is not None:
            self.results[call.node, index] = self._item(node, position, meta)

    def _item(self, node: fx.Node, position: int, meta: dict[str, Any]) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (node, position))
        item.meta = dict(meta)
        return item
