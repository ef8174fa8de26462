"""Gather parameters and reduce gradients inside the graphs of a chunk, block by block.

    %y1 = block1_forward(%w1, %x)              %a2 = all_gather(%w2_shard)      # while block 1 runs
    %y2 = block1_forward(%w2, %y1)       ->    %y1 = block1_forward(%w1, %x)
                                               %w2 = unflatten_shards(wait(%a2))
                                               %y2 = block1_forward(%w2, %y1)

    %g2 = block1_backward(..)                  %g2 = block1_backward(..)
    %g1 = block1_backward(..)            ->    %r2 = reduce_scatter(%g2)        # while block 1 runs
    return (.., (%g1, %g2))                    %g1 = block1_backward(..)
                                               return (.., (wait(%r2),), (%g1,))

What the first call of a graph reads stays an argument, and what the last call gives stays a result:
the rank graph gathers and reduces those beside other chunks' work. A parameter is whole from the
call before its first reader to its last reader (Rajbhandari et al., SC 2020, section 5.3; Zhao et
al., VLDB 2023, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from msc.ir.structure import placeholders
from msc.ir.torch_private import lazy_graph_module
from msc.passes.zero.collectives import Gathering, Reduction, ShardGroup


@dataclass(frozen=True)
class Gathered:
    """A graph that gathers; `whole` are the parameters that it is still given whole."""

    gm: fx.GraphModule
    whole: tuple[str, ...]


def gather_inside(gm: fx.GraphModule, sharding: ShardGroup) -> Gathered:
    """The graph of a chunk, with shards as arguments for all that its first call does not read."""
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    number = {call: index for index, call in enumerate(calls)}
    first_read: dict[str, int] = {}
    for node in placeholders(gm):
        if node.meta["kind"] == "parameter" and node.users:
            first_read[node.meta["name"]] = min(number[user] for user in node.users)
    # of the first call that reads parameters: the prelude reads none
    start = min((n for name, n in first_read.items() if name in sharding.shards), default=0)
    whole = tuple(name for name, n in first_read.items() if n <= start)
    buckets: dict[int, list[str]] = {}
    for name, first in first_read.items():
        if name not in whole and name in sharding.shards:
            buckets.setdefault(first, []).append(name)
    return Gathered(_Gather(gm, sharding, set(whole), buckets).build(), whole)


@dataclass(frozen=True)
class Reduced:
    """A graph that reduces gradients.

    It returns what it did, but for the gradients: first the shards of those in `names`, then the
    others, of this rank and whole.
    """

    gm: fx.GraphModule
    names: tuple[str, ...]
    others: tuple[str, ...]


def reduce_inside(gm: fx.GraphModule, names: Sequence[str], sharding: ShardGroup) -> Reduced:
    """A graph that returns `(.., gradients)`, with all but the last call's gradients reduced."""
    outputs: Any = gm.graph.output_node().args[0]
    *_, gradients = outputs
    calls_before: dict[fx.Node, int] = {}
    count = 0
    for node in gm.graph.nodes:
        count += node.op == "call_module"
        calls_before[node] = count
    buckets: dict[int, list[int]] = {}
    for index, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
        if name in sharding.shards and calls_before[gradient] < count:
            buckets.setdefault(calls_before[gradient], []).append(index)
    return _Reduce(gm, names, sharding, buckets).build()


class _Copy:
    """Copies a graph node by node."""

    def __init__(self, gm: fx.GraphModule, sharding: ShardGroup) -> None:
        self.gm = gm
        self.sharding = sharding
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}

    def act(self, function: Any, *args: Any, val: Any) -> fx.Node:
        """Append a call."""
        node = self.graph.call_function(function, args)
        node.meta = {"val": val}
        return node

    def copy(self, node: fx.Node) -> fx.Node:
        """Append a node as it is."""
        copied = self.graph.node_copy(node, self.nodes.__getitem__)
        self.nodes[node] = copied
        return copied

    def finish(self, output: Any) -> fx.GraphModule:
        """The new graph, with the graphs that the old one calls."""
        self.graph.output(output)
        called = {str(n.target) for n in self.gm.graph.nodes if n.op == "call_module"}
        modules = {name: self.gm.get_submodule(name) for name in called}
        found = lazy_graph_module(modules, self.graph)
        found.meta = dict(self.gm.meta)
        return found


class _Gather(_Copy):
    def __init__(
        self,
        gm: fx.GraphModule,
        sharding: ShardGroup,
        whole: set[str],
        buckets: dict[int, list[str]],
    ) -> None:
        super().__init__(gm, sharding)
        self.whole = whole
        self.buckets = buckets
        self.given: dict[str, fx.Node] = {}  # the old placeholders
        self.flying: dict[int, list[Gathering]] = {}

    def build(self) -> fx.GraphModule:
        number = -1
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_module":
                number += 1
                if number == 0:
                    self._start(0)
                self._start(number + 1)
                self._finish(number)
                self.copy(node)
            elif node.op != "output":
                self.copy(node)
        output = fx.map_arg(self.gm.graph.output_node().args[0], self.nodes.__getitem__)
        return self.finish(output)

    def _placeholder(self, node: fx.Node) -> None:
        copied = self.copy(node)
        name = node.meta["name"]
        if node.meta["kind"] == "parameter" and name in self.sharding.shards:
            self.given[name] = node
            if name not in self.whole:
                val = self.sharding.shard_of(name, node.meta["val"])
                shown = self.sharding.placements_of(name, node.meta)
                copied.meta = {**node.meta, **shown, "val": val}

    def _start(self, number: int) -> None:
        shards = {name: self.nodes[self.given[name]] for name in self.buckets.get(number, ())}
        self.flying[number] = self.sharding.start_gathers(self.act, shards)

    def _finish(self, number: int) -> None:
        for gathering in self.flying.pop(number, ()):
            wholes = [self.given[name].meta["val"] for name in gathering.names]
            for name, node in gathering.finish(self.act, wholes).items():
                self.nodes[self.given[name]] = node


class _Reduce(_Copy):
    def __init__(
        self,
        gm: fx.GraphModule,
        names: Sequence[str],
        sharding: ShardGroup,
        buckets: dict[int, list[int]],
    ) -> None:
        super().__init__(gm, sharding)
        self.names = names
        self.buckets = buckets
        outputs: Any = gm.graph.output_node().args[0]
        *self.others, self.gradients = outputs
        self.flying: dict[int, list[Reduction]] = {}
        self.found: dict[str, fx.Node] = {}

    def build(self) -> Reduced:
        number = 0
        for node in self.gm.graph.nodes:
            if node.op == "call_module":
                self._start(number)
                self._finish(number - 1)
                number += 1
            if node.op != "output":
                self.copy(node)
        for left in sorted(self.flying):
            self._finish(left)
        rest = [i for i, name in enumerate(self.names) if name not in self.found]
        kept = tuple(name for name in self.names if name in self.found)
        output = (
            *fx.map_arg(tuple(self.others), self.nodes.__getitem__),
            tuple(self.found[name] for name in kept),
            tuple(self.nodes[self.gradients[index]] for index in rest),
        )
        return Reduced(self.finish(output), kept, tuple(self.names[index] for index in rest))

    def _start(self, number: int) -> None:
        indices = self.buckets.get(number, ())
        gradients = {self.names[i]: self.nodes[self.gradients[i]] for i in indices}
        self.flying[number] = self.sharding.start_reductions(self.act, gradients)

    def _finish(self, number: int) -> None:
        for reduction in self.flying.pop(number, ()):
            self.found |= reduction.finish(self.act)
