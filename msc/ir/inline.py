"""Inline the graphs that a graph calls: one flat graph that computes the same.

    %h2 = call block0(%h1, %w2)  # h.2          %h_2_norm = aten.relu(%h1)  # h.2.ln
    %x = %h2[0]                           ->    %h_2_mm = aten.mm(%h_2_norm, %w2)  # h.2.fc
    return (%x,)                                return (%h_2_mm,)

The graph of equal layers carries the module paths of the first of them; inlined nodes get those of
the layer that the call stands for. Numerics: kept bit for bit; the same ops in the same order.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

from torch import fx

from msc.ir.communication import subgraph
from msc.ir.structure import layer_of, placeholders


def inline(gm: fx.GraphModule) -> fx.GraphModule:
    """A flat copy of `gm`: every called graph's nodes stand where the call was, at any depth.

    Items of a call's results are the inner nodes themselves, with their own metadata, so `getitem`
    of a call is gone. Nodes of `gm` keep their names; others get the call's module path, or the
    call's name where it has none, as a prefix. `gm` and the graphs that it calls stay as they are.
    Raises `VerifyError` for a call of what is no graph, or one with keyword arguments.
    """
    inliner = _Inliner({node.name for node in gm.graph.nodes})
    result = inliner.copy(gm, {}, "", ("", ""))
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
        renamed: tuple[str, str],
        before: tuple[str, str] = ("", ""),
    ) -> Any:
        """Copy the nodes of `gm` and return its result.

        values: what stands for a node of `gm`: a node, or a structure of nodes for the results of
            a call. Placeholders that it lacks become placeholders.
        renamed: a layer's module path in `gm`, and the one that its nodes get; before: the same of
            the nodes that come from the call before.
        """
        for node in gm.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node in values:
                continue
            args = fx.map_arg(node.args, values.__getitem__)
            if node.op == "call_module":
                values[node] = self._call(gm, node, args, prefix, renamed)
            elif node.target is operator.getitem and not isinstance(args[0], fx.Node):
                values[node] = args[0][args[1]]
            else:
                values[node] = self._node(gm, node, args, values, prefix)
                values[node].meta = dict(node.meta)
                of_before = values[node].meta.pop("of_call_before", False)
                if path := node.meta.get("module_path"):
                    new = before if of_before else renamed
                    values[node].meta["module_path"] = _renamed(path, new)
        raise ValueError("a graph without an output cannot be inlined")

    def _call(
        self,
        gm: fx.GraphModule,
        node: fx.Node,
        args: tuple[Any, ...],
        prefix: str,
        renamed: tuple[str, str],
    ) -> Any:
        callee = subgraph(gm, node)
        path = _renamed(node.meta.get("module_path") or "", renamed)
        inner = (_home(callee, False), path) if path else renamed
        path_before = _renamed(node.meta.get("module_path_before", ""), renamed)
        before = (_home(callee, True), path_before)
        values = dict(zip(placeholders(callee), args, strict=True))
        name = path.replace(".", "_") or node.name
        return self.copy(callee, values, f"{prefix}{name}_", inner, before)

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


def _home(gm: fx.GraphModule, of_before: bool) -> str:
    """The path of the one layer whose nodes a graph holds; empty if there is none, or several.

    of_before: of those nodes that come from the call before, or of the others.
    """
    found: set[str] = set()
    for node in gm.graph.nodes:
        if node.meta.get("of_call_before", False) != of_before:
            continue
        layer = layer_of(node.meta.get("module_path") or "")
        if layer is not None:
            found.add(f"{layer[0]}.{layer[1]}" if layer[0] else str(layer[1]))
    return found.pop() if len(found) == 1 else ""


def _renamed(path: str, renamed: tuple[str, str]) -> str:
    old, new = renamed
    if old and (path == old or path.startswith(f"{old}.")):
        return new + path[len(old) :]
    return path


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value
