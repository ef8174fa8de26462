"""Cut the forward graph into blocks: one graph for each distinct layer, and the prelude.

    %norm = ...  # layers.0.norm            prelude:  %cos, %mask   (no parameter above them)
    %mlp  = ...  # layers.0.mlp       ->    block 1 "layers.0", instances layers.0, layers.1, ...
    %norm_1 = ...  # layers.1.norm          instances: sources of each parameter and value

A layer is an element of a module container (`layers.3`, `transformer.h.3`), the outermost one on a
node's module path. Equal layers share one block graph: everything after the cut is done once for
each distinct block. Numerics: kept bit for bit.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from msc.ir.structure import Instance, Source, Structure, layer_of, output_nodes
from msc.ir.torch_private import lazy_graph_module
from msc.ir.values import operand_nodes, tensors_of
from msc.ir.walks import ancestors

_DETACHING = {torch.ops.aten.detach.default}


def cut(gm: fx.GraphModule, stages: int = 1) -> Structure:
    """Cut a normalized forward graph; see the module's picture.

    For several pipeline stages a model without numbered layers is cut at its outermost modules.
    """
    mark_differentiable(gm)
    prelude_nodes = _without_parameters(gm)
    segment_of = _segments(gm, prelude_nodes, by_module=stages > 1)
    return _Cutter(gm, prelude_nodes, segment_of).run()


def mark_differentiable(gm: fx.GraphModule) -> None:
    """Set `meta["differentiable"]`: whether a gradient flows to the node's value, from the loss."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["differentiable"] = bool(node.meta.get("requires_grad", False))
        elif node.op == "call_function":
            values = tensors_of(node)
            floating = any(value.is_floating_point() or value.is_complex() for value in values)
            node.meta["differentiable"] = (
                floating
                and node.target not in _DETACHING
                and any(operand.meta["differentiable"] for operand in operand_nodes(node))
            )
    loss = output_nodes(gm)[0]
    for node in reversed(gm.graph.nodes):
        if node is not loss and node.op in ("placeholder", "call_function"):
            reached = any(user.meta.get("differentiable", False) for user in node.users)
            node.meta["differentiable"] = node.meta["differentiable"] and reached


def _without_parameters(gm: fx.GraphModule) -> set[fx.Node]:
    """Call nodes with no parameter among their ancestors. Random ops are keyed: they count too."""
    found: set[fx.Node] = set()
    tainted: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if node.meta["kind"] == "parameter":
                tainted.add(node)
        elif node.op == "call_function":
            if any(operand in tainted for operand in node.all_input_nodes):
                tainted.add(node)
            else:
                found.add(node)
    return found


def _reading_inputs(written: Mapping[str, fx.Node]) -> frozenset[str]:
    """Names of the values that depend on an input of the model."""
    return frozenset(
        name
        for name, root in written.items()
        if any(node.meta.get("kind") == "input" for node in ancestors([root]))
    )


def _segments(gm: fx.GraphModule, prelude: set[fx.Node], by_module: bool) -> dict[fx.Node, int]:
    """Number of the segment of each call node outside the prelude; never falls along an edge."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n not in prelude]
    layers = _layers(nodes, by_module)
    numbers: dict[tuple[str, int], int] = {}
    last_layer_position = -1
    for position, node in enumerate(nodes):
        layer = layers[node]
        if layer is not None:
            numbers.setdefault(layer, len(numbers) + 1)
            last_layer_position = position
    for_loss = ancestors(output_nodes(gm)[:1])  # the others make what buffers will hold
    segment_of: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        layer = layers[node]
        before = [segment_of[n] for n in node.all_input_nodes if n in segment_of]
        own = numbers[layer] if layer is not None else 0
        if layer is None and position > last_layer_position and node in for_loss:
            own = len(numbers) + 1
        segment_of[node] = max([own, *before])
    return segment_of


def _layers(nodes: list[fx.Node], by_module: bool) -> dict[fx.Node, tuple[str, int] | None]:
    """The layer of each node: an entry of a numbered container with several entries.

    Where a model has no such container and `by_module` asks for it, its outermost modules are.
    """
    paths = {node: node.meta.get("module_path") or "" for node in nodes}
    layers = {node: layer_of(path) for node, path in paths.items()}
    members: dict[str, set[int]] = {}
    for layer in layers.values():
        if layer is not None:
            members.setdefault(layer[0], set()).add(layer[1])
    if not by_module or any(len(entries) > 1 for entries in members.values()):
        return {
            node: layer if layer is not None and len(members[layer[0]]) > 1 else None
            for node, layer in layers.items()
        }
    tops = {node: path.partition(".")[0] for node, path in paths.items()}
    return {node: (top, 0) if top else None for node, top in tops.items()}


class _Cutter:
    def __init__(
        self, gm: fx.GraphModule, prelude: set[fx.Node], segment_of: dict[fx.Node, int]
    ) -> None:
        self.gm = gm
        self.prelude_nodes = prelude
        self.segment_of = segment_of
        self.loss, *written = output_nodes(gm)
        self.written = dict(zip(gm.meta.get("buffers", ()), written, strict=True))
        self.instance_of: dict[int, int] = {}
        self.output_index: dict[fx.Node, int] = {}
        self.prelude_outputs: dict[fx.Node, str] = {}

    def run(self) -> Structure:
        segments: dict[int, list[fx.Node]] = {}
        for node, segment in self.segment_of.items():
            segments.setdefault(segment, []).append(node)
        blocks: dict[str, fx.GraphModule] = {}
        by_key: dict[str, str] = {}
        instances: list[Instance] = []
        for segment in sorted(segments):
            nodes = segments[segment]
            self.instance_of[segment] = len(instances)
            graph, inputs = self._block(segment, nodes)
            key = structural_hash(graph)
            name = by_key.setdefault(key, f"block{len(by_key)}")
            blocks.setdefault(name, graph)
            sources = tuple(self._source(node) for node in inputs)
            instances.append(Instance(len(instances), name, _path(nodes), sources))
        loss = self._source(self.loss)
        buffers = {name: self._source(node) for name, node in self.written.items()}
        prelude = self._prelude()
        names = list(self.prelude_outputs.values())
        from_inputs = _reading_inputs(self.written)
        return Structure(blocks, instances, prelude, names, loss, buffers, from_inputs)

    def _block(self, segment: int, nodes: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        inside = set(nodes)
        externals: dict[fx.Node, None] = {}
        for node in nodes:
            for operand in node.all_input_nodes:
                if operand not in inside:
                    externals[operand] = None
        # in order of first use, the same in equal layers wherever the values come from
        inputs = sorted(externals, key=self._kind_order)
        outputs = [
            node
            for node in nodes
            if node is self.loss
            or node in self.written.values()
            or any(user not in inside for user in _real_users(node))
        ]
        for index, node in enumerate(outputs):
            self.output_index[node] = index
        return copy_subgraph(inputs, nodes, outputs, self._placeholder_meta), inputs

    def _kind_order(self, node: fx.Node) -> int:
        if node.op == "placeholder":
            return {"parameter": 0, "buffer": 1}.get(node.meta["kind"], 2)
        return 2 if node in self.prelude_nodes else 3

    def _placeholder_meta(self, node: fx.Node) -> dict[str, Any]:
        meta = dict(node.meta)
        if node.op != "placeholder":
            meta["kind"] = "prelude" if node in self.prelude_nodes else "value"
            meta["name"] = node.name
        return meta

    def _source(self, node: fx.Node) -> Source:
        if node.op == "placeholder":
            if node.meta["kind"] == "parameter":
                return Source("parameter", node.meta["name"])
            self.prelude_outputs.setdefault(node, node.name)
            return Source("prelude", node.name)
        if node in self.prelude_nodes:
            self.prelude_outputs.setdefault(node, node.name)
            return Source("prelude", node.name)
        segment = self.segment_of[node]
        return Source("block", "", self.instance_of[segment], self.output_index[node])

    def _prelude(self) -> fx.GraphModule:
        inputs = [
            node
            for node in self.gm.graph.nodes
            if node.op == "placeholder" and node.meta["kind"] != "parameter"
        ]
        nodes = [node for node in self.gm.graph.nodes if node in self.prelude_nodes]
        outputs = list(self.prelude_outputs)
        return copy_subgraph(inputs, nodes, outputs, lambda node: dict(node.meta))


def _real_users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _path(nodes: list[fx.Node]) -> str:
    """The layer that the nodes belong to, or their common module."""
    for node in nodes:
        path = node.meta.get("module_path") or ""
        layer = layer_of(path)
        if layer is not None:
            return f"{layer[0]}.{layer[1]}" if layer[0] else str(layer[1])
    paths = [path for node in nodes if (path := node.meta.get("module_path"))]
    return paths[-1] if paths else ""


def copy_subgraph(
    inputs: list[fx.Node],
    nodes: list[fx.Node],
    outputs: list[fx.Node],
    placeholder_meta: Callable[[fx.Node], dict[str, Any]],
) -> fx.GraphModule:
    """A graph of its own from part of another: placeholders, copied nodes, a tuple of outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = placeholder_meta(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[node] for node in outputs))
    gm = lazy_graph_module({}, graph)
    gm.graph.eliminate_dead_code()
    return gm


def structural_hash(gm: fx.GraphModule) -> str:
    """A digest that is equal exactly for graphs that differ only in names and module paths."""
    digest = hashlib.sha256()
    numbers: dict[fx.Node, int] = {}
    for number, node in enumerate(gm.graph.nodes):
        numbers[node] = number
        values = tensors_of(node)
        shapes = tuple((tuple(v.shape), str(v.dtype), v.stride()) for v in values)
        if node.op == "placeholder":
            head: Any = (node.meta["kind"], node.meta.get("differentiable"))
        else:
            target = node.target
            head = target.__name__ if target is operator.getitem else str(target)
        args = fx.map_arg((node.args, node.kwargs), lambda n: fx.Node.__name__ + str(numbers[n]))
        digest.update(repr((node.op, head, args, shapes)).encode())
    return digest.hexdigest()
