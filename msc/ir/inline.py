"""Inline the graphs that a graph calls: one flat graph that computes the same.

    %h2 = call block0(%h1, %w2)  # h.2          %h_2_norm = aten.relu(%h1)  # h.2.ln
    %x = %h2[0]                           ->    %h_2_mm = aten.mm(%h_2_norm, %w2)  # h.2.fc
    return (%x,)                                return (%h_2_mm,)

Inlined nodes get the module paths of the layer that the call stands for (`msc.ir.call_paths`).
Numerics: kept bit for bit; the same ops in the same order.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

from torch import fx

from msc.ir.call_paths import CallPaths
from msc.ir.communication import subgraph
from msc.ir.structure import placeholders


def inline(gm: fx.GraphModule) -> fx.GraphModule:
    """A flat copy of `gm`: every called graph's nodes stand where the call was, at any depth.

    Items of a call's results are the inner nodes themselves, with their own metadata, so `getitem`
    of a call is gone. Nodes of `gm` keep their names; others get the call's module path, or the
    call's name where it has none, as a prefix. `gm` and the graphs that it calls stay as they are.
    Raises `VerifyError` for a call of what is no graph, or one with keyword arguments.
    """
    inliner = _Inliner({node.name for node in gm.graph.nodes})
    result = inliner.copy(gm, {}, "", CallPaths())
    inliner.graph.output(result)
    inliner.graph.output_node().meta = dict(gm.graph.output_node().meta)
    flat = fx.GraphModule(inliner.attributes, inliner.graph)
    flat.meta = dict(gm.meta)
    return flat


class _Inliner:
    def __init__(self, names: set[str]) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self._names = names
        self._copies: Counter[str] = Counter()

    def copy(
        self,
        gm: fx.GraphModule,
        values: dict[fx.Node, Any],
        prefix: str,
        paths: CallPaths,
    ) -> Any:
        """Copy the nodes of `gm` and return its result.

        values: what stands for a node of `gm`: a node, or a structure of nodes for the results of
            a call. Placeholders that it lacks become placeholders.
        """
        for node in gm.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node in values:
                continue
            args = fx.map_arg(node.args, values.__getitem__)
            if node.op == "call_module":
                values[node] = self._call(gm, node, args, prefix, paths)
            elif node.target is operator.getitem and not isinstance(args[0], fx.Node):
                values[node] = args[0][args[1]]
            else:
                values[node] = self._node(gm, node, args, values, prefix)
                values[node].meta = paths.meta(node)
        raise ValueError("a graph without an output cannot be inlined")

    def _call(
        self,
        gm: fx.GraphModule,
        node: fx.Node,
        args: tuple[Any, ...],
        prefix: str,
        paths: CallPaths,
    ) -> Any:
        callee = subgraph(gm, node)
        values = dict(zip(placeholders(callee), args, strict=True))
        name = paths.path(node).replace(".", "_") or node.name
        return self.copy(callee, values, f"{prefix}{name}_", paths.of(node, callee))

    def _node(
        self,
        gm: fx.GraphModule,
        node: fx.Node,
        args: tuple[Any, ...],
        values: dict[fx.Node, Any],
        prefix: str,
    ) -> fx.Node:
        target = node.target
        if node.op == "get_attr":
            target = f"{prefix}{node.target}".replace(".", "_")
            self.attributes[target] = _attribute(gm, str(node.target))
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        name = self._new_name(prefix + node.name) if prefix else node.name
        return self.graph.create_node(node.op, target, args, kwargs, name)

    def _new_name(self, wanted: str) -> str:
        name = wanted
        while name in self._names:
            self._copies[wanted] += 1
            name = f"{wanted}_{self._copies[wanted]}"
        self._names.add(name)
        return name


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value
