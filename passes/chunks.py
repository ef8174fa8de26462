"""Assemble chunks: runs of block instances as graphs that call the block graphs.

    forward:   parameters, buffers, inputs, step values, received  ->  (sent), loss, (saved),
                                                                       (written buffers, if any)
    backward:  parameters, (saved), gradients of what was sent     ->  (gradients of received),
                                                                       (gradients of parameters)

Where the backward is split, weight gradients are made later, of what it has kept:

    backward:  parameters, (saved), gradients of what was sent  ->  (gradients of received), (kept)
    weights:   parameters, (some saved), (kept)                 ->  (), (gradients of parameters)

Values that skip over chunks are relayed through the chunks between, and their gradients are summed
on the way back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from msc.ir.errors import PlanError
from msc.ir.structure import Instance, Source, output_nodes, placeholders
from msc.ir.torch_private import lazy_graph_module
from msc.passes.differentiate import Differentiated
from msc.passes.halves import Halves
from msc.passes.schedules.stages import Kind

aten = torch.ops.aten
Key = tuple[int, int]
"""An output of a block instance: (instance, output)."""


def balance(costs: Sequence[float], num_chunks: int) -> list[list[int]]:
    """Split a sequence of costs into runs so that the largest run's cost is the smallest possible.

    Exact, by dynamic programming; ties give the earlier chunks less.
    """
    if num_chunks > len(costs):
        raise PlanError(f"{len(costs)} blocks cannot fill {num_chunks} pipeline chunks.")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    best = [[float("inf")] * (count + 1) for _ in range(num_chunks + 1)]
    cut = [[0] * (count + 1) for _ in range(num_chunks + 1)]
    best[0][0] = 0.0
    for chunks in range(1, num_chunks + 1):
        for end in range(chunks, count + 1):
            for start in range(chunks - 1, end):
                worst = max(best[chunks - 1][start], total[end] - total[start])
                if worst < best[chunks][end]:
                    best[chunks][end], cut[chunks][end] = worst, start
    runs: list[list[int]] = []
    end = count
    for chunks in range(num_chunks, 0, -1):
        start = cut[chunks][end]
        runs.append(list(range(start, end)))
        end = start
    return runs[::-1]


@dataclass
class Block:
    """A distinct block on one rank: its programs, and the coordinates that its forward reads.

    placeholders of the forward: the instance's sources in order, then the coordinates.
    """

    programs: Differentiated
    coordinates: list[str]


@dataclass
class Prelude:
    """The prelude of one chunk: `outputs[i]` names the variant that result i is."""

    gm: fx.GraphModule
    outputs: list[Source]


@dataclass
class Chunk:
    """One chunk's graphs and what they read and yield, in the order of their placeholders.

    values: of its parameters, as fake tensors: all that dp ranks hold together.
    whole: of graphs that gather parameters, which they are given whole. reduced: parameters whose
    gradients the backward reduces itself; not_reduced: the others, where there are such.
    """

    index: int
    stage: int
    instances: list[Instance]
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    parameters: list[str]
    values: dict[str, torch.Tensor]
    others: list[tuple[str, str]]  # (kind, name) of buffers, inputs, rng, step values, coordinates
    received: list[Key]
    sent: list[Key]
    has_loss: bool
    written: list[str]  # buffers
    sent_gradients: list[Key] = field(default_factory=list)  # of received values, sent back
    received_gradients: list[Key] = field(default_factory=list)  # of sent values
    parameter_gradients: list[str] = field(default_factory=list)
    weight_backward: fx.GraphModule | None = None
    weight_saved: list[int] = field(default_factory=list)  # numbers of the saved values it reads
    whole: dict[Kind, tuple[str, ...]] = field(default_factory=dict)
    reduced: tuple[str, ...] = ()
    not_reduced: tuple[str, ...] = ()


class _Later(NamedTuple):
    """The weight gradients of an instance, and what they read of the chunk's backward."""

    instance: Instance
    halves: Halves
    reads: list[fx.Node]


def crossing(instances: Sequence[Instance], chunk_of: dict[int, int], num: int) -> list[list[Key]]:
    """For each chunk the values that it receives: made before it, read in it or after it."""
    last_reader: dict[Key, int] = {}
    for instance in instances:
        for source in instance.sources:
            if source.kind == "block":
                key = (source.instance, source.output)
                last_reader[key] = max(last_reader.get(key, 0), chunk_of[instance.index])
    result: list[list[Key]] = [[] for _ in range(num)]
    for key, last in sorted(last_reader.items()):
        for chunk in range(chunk_of[key[0]] + 1, last + 1):
            result[chunk].append(key)
    return result


class ChunkBuilder:
    """Builds the forward and backward graph of one chunk."""

    def __init__(
        self,
        index: int,
        stage: int,
        instances: list[Instance],
        blocks: dict[str, Block],
        prelude: Prelude,
        received: list[Key],
        sent: list[Key],
        received_gradients: list[Key],
        loss: Source,
        value_meta: dict[Key, dict[str, Any]],
        parameter_meta: dict[str, dict[str, Any]],
        written: dict[str, Source],
    ) -> None:
        self.written = written
        self.index = index
        self.stage = stage
        self.instances = instances
        self.blocks = blocks
        self.prelude = prelude
        self.received = received
        self.sent = sent
        self.received_gradients = received_gradients
        self.loss: Key = (loss.instance, loss.output)
        self.has_loss = any(instance.index == loss.instance for instance in instances)
        self.value_meta = value_meta
        self.parameter_meta = parameter_meta
        names = (s.name for i in instances for s in i.sources if s.kind == "parameter")
        self.parameters = list(dict.fromkeys(names))
        self.saved_of: dict[int, list[Any]] = {}

    def build(self) -> Chunk:
        forward, others, saved = self._forward()
        chunk = Chunk(
            self.index,
            self.stage,
            self.instances,
            forward,
            None,
            self.parameters,
            {name: self.parameter_meta[name]["val"] for name in self.parameters},
            others,
            self.received,
            self.sent,
            self.has_loss,
            list(self.written),
        )
        if any(self.blocks[i.block].programs.backward is not None for i in self.instances):
            chunk.backward = self._backward(saved, chunk)
        return chunk

    # -- forward

    def _forward(self) -> tuple[fx.GraphModule, list[tuple[str, str]], dict[fx.Node, int]]:
        graph = fx.Graph()
        modules: dict[str, fx.GraphModule] = {}
        self.parameter_nodes = {n: self._parameter(graph, n) for n in self.parameters}
        self.other_nodes: dict[tuple[str, str], fx.Node] = {}
        for node in placeholders(self.prelude.gm):
            key = (node.meta["kind"], node.meta["name"])
            self.other_nodes[key] = _placeholder(graph, node.name, node.meta)
        for instance in self.instances:
            block = self.blocks[instance.block]
            names = placeholders(block.programs.forward)[len(instance.sources) :]
            for node in names:
                key = (node.meta["kind"], node.meta["name"])
                if key not in self.other_nodes:
                    self.other_nodes[key] = _placeholder(graph, node.name, node.meta)
        self.values: dict[Key, fx.Node] = {}
        for instance_index, output in self.received:
            meta = self.value_meta[instance_index, output]
            name = f"received_{instance_index}_{output}"
            meta = {**meta, "kind": "value", "name": name}
            self.values[instance_index, output] = _placeholder(graph, name, meta)
        prelude_values = self._call_prelude(graph, modules)
        saved: dict[fx.Node, int] = {}
        for instance in self.instances:
            self._call_block(graph, modules, instance, prelude_values, saved)
        sent = tuple(self.values[key] for key in self.sent)
        loss = self.values[self.loss] if self.has_loss else None
        buffers = tuple(
            prelude_values[source]
            if source.kind == "prelude"
            else self.values[source.instance, source.output]
            for source in self.written.values()
        )
        graph.output((sent, loss, tuple(saved), *([buffers] if buffers else [])))
        gm = lazy_graph_module(modules, graph)
        return gm, list(self.other_nodes), saved

    def _parameter(self, graph: fx.Graph, name: str) -> fx.Node:
        text = name.replace(".", "_")
        text = text if text.isidentifier() else f"_{text}"
        return _placeholder(graph, text, self.parameter_meta[name])

    def _call_prelude(
        self, graph: fx.Graph, modules: dict[str, fx.GraphModule]
    ) -> dict[Source, fx.Node]:
        if not self.prelude.outputs:
            return {}
        modules["prelude"] = self.prelude.gm
        args = tuple(
            self.other_nodes[node.meta["kind"], node.meta["name"]]
            for node in placeholders(self.prelude.gm)
        )
        results = _call(graph, "prelude", self.prelude.gm, args)
        return dict(zip(self.prelude.outputs, results, strict=True))

    def _call_block(
        self,
        graph: fx.Graph,
        modules: dict[str, fx.GraphModule],
        instance: Instance,
        prelude_values: dict[Source, fx.Node],
        saved: dict[fx.Node, int],
    ) -> None:
        block = self.blocks[instance.block]
        programs = block.programs
        target = f"{instance.block}_forward"
        modules[target] = programs.forward
        args: list[fx.Node] = []
        for source in instance.sources:
            if source.kind == "parameter":
                args.append(self.parameter_nodes[source.name])
            elif source.kind == "block":
                args.append(self.values[source.instance, source.output])
            else:
                args.append(prelude_values[source])
        args += [self.other_nodes["coordinate", axis] for axis in block.coordinates]
        results = _call(graph, target, programs.forward, tuple(args), instance.path)
        for output in range(programs.num_outputs):
            self.values[instance.index, output] = results[output]
        reads: list[Any] = []
        for item in programs.saved:
            node = args[item.index] if item.is_input else results[programs.num_outputs + item.index]
            if item.is_input and instance_source(instance, item.index, "parameter"):
                reads.append(instance.sources[item.index].name)
            else:
                saved.setdefault(node, len(saved))
                reads.append(saved[node])
        self.saved_of[instance.index] = reads

    # -- backward

    def _backward(self, saved: dict[fx.Node, int], chunk: Chunk) -> fx.GraphModule:
        graph = fx.Graph()
        modules: dict[str, fx.GraphModule] = {}
        parameters = {name: self._parameter(graph, name) for name in self.parameters}
        stored = [
            _placeholder(
                graph, f"saved_{i}", {"val": node.meta["val"], "kind": "saved", "name": node.name}
            )
            for node, i in saved.items()
        ]
        gradients: dict[Key, fx.Node] = {}
        for key in self.received_gradients:
            meta = self.value_meta[key]
            name = f"gradient_{key[0]}_{key[1]}"
            given = {"val": meta["val"], "kind": "gradient", "name": name}
            given["placement"] = meta.get("grad_placement", {})
            gradients[key] = _placeholder(graph, name, given)
            chunk.received_gradients.append(key)
        by_parameter: dict[str, fx.Node] = {}
        later: list[_Later] = []
        for instance in reversed(self.instances):
            self._call_backward(
                graph, modules, instance, parameters, stored, gradients, by_parameter, later
            )
        for key in self.received:
            if self.value_meta[key].get("differentiable") and key in gradients:
                chunk.sent_gradients.append(key)
        sent = tuple(gradients[key] for key in chunk.sent_gradients)
        if later:
            graph.output((sent, self._weight_backward(chunk, later, parameters, stored)))
            return lazy_graph_module(modules, graph)
        chunk.parameter_gradients = [name for name in self.parameters if name in by_parameter]
        graph.output((sent, tuple(by_parameter[name] for name in chunk.parameter_gradients)))
        return lazy_graph_module(modules, graph)

    def _weight_backward(
        self,
        chunk: Chunk,
        later: list[_Later],
        parameters: dict[str, fx.Node],
        stored: list[fx.Node],
    ) -> tuple[fx.Node, ...]:
        """Make the graph of the weight gradients; return the values to keep for it."""
        graph = fx.Graph()
        nodes = {node: self._parameter(graph, name) for name, node in parameters.items()}
        reads = {read for each in later for read in each.reads}
        chunk.weight_saved = [i for i, node in enumerate(stored) if node in reads]
        for index in chunk.weight_saved:
            nodes[stored[index]] = _placeholder(graph, stored[index].name, stored[index].meta)
        ordered = dict.fromkeys(read for each in later for read in each.reads)
        kept = tuple(node for node in ordered if node not in nodes)
        for index, node in enumerate(kept):
            meta = {"val": node.meta["val"], "kind": "saved", "name": node.name}
            nodes[node] = _placeholder(graph, f"kept_{index}", meta)
        modules: dict[str, fx.GraphModule] = {}
        found: dict[str, fx.Node] = {}
        for instance, halves, read in later:
            target = f"{instance.block}_weight_backward"
            modules[target] = halves.weights
            args = tuple(nodes[node] for node in read)
            results = _call(graph, target, halves.weights, args, instance.path)
            for position, result in zip(halves.weight_gradients, results, strict=True):
                _add(graph, found, instance.sources[position].name, result)
        chunk.parameter_gradients = [name for name in self.parameters if name in found]
        graph.output(((), tuple(found[name] for name in chunk.parameter_gradients)))
        chunk.weight_backward = lazy_graph_module(modules, graph)
        return kept

    def _call_backward(
        self,
        graph: fx.Graph,
        modules: dict[str, fx.GraphModule],
        instance: Instance,
        parameters: dict[str, fx.Node],
        stored: list[fx.Node],
        gradients: dict[Key, fx.Node],
        by_parameter: dict[str, fx.Node],
        later: list[_Later],
    ) -> None:
        programs = self.blocks[instance.block].programs
        if programs.backward is None:
            return
        halves = programs.halves
        target, gm, positions = f"{instance.block}_backward", programs.backward, programs.gradients
        if halves is not None:
            target, gm = f"{instance.block}_input_backward", halves.inputs
            positions = halves.input_gradients
        modules[target] = gm
        args = [
            parameters[read] if isinstance(read, str) else stored[read]
            for read in self.saved_of[instance.index]
        ]
        reads = placeholders(programs.backward)[len(args) :]
        for output, node in zip(programs.tangents, reads, strict=True):
            args.append(self._tangent(graph, (instance.index, output), node, gradients))
        results = _call(graph, target, gm, tuple(args), instance.path)
        if halves is not None and halves.weight_gradients:
            kept = results[len(positions) :]
            later.append(_Later(instance, halves, [*(args[i] for i in halves.given), *kept]))
        for position, result in zip(positions, results[: len(positions)], strict=True):
            source = instance.sources[position]
            if source.kind == "parameter":
                _add(graph, by_parameter, source.name, result)
            else:
                assert source.kind == "block"
                _add(graph, gradients, (source.instance, source.output), result)

    def _tangent(
        self, graph: fx.Graph, key: Key, node: fx.Node, gradients: dict[Key, fx.Node]
    ) -> fx.Node:
        found = gradients.get(key)
        is_loss = self.has_loss and key == self.loss
        if found is not None and not is_loss:
            return found
        value = node.meta["val"]
        fill = 1.0 if is_loss else 0.0
        seed = graph.call_function(
            aten.full.default, (list(value.shape), fill), {"dtype": value.dtype}
        )
        seed.meta = {"val": value, "phase": "backward"}
        if found is None:
            return seed
        return _sum(graph, found, seed)


def instance_source(instance: Instance, index: int, kind: str) -> bool:
    """Whether placeholder `index` of an instance comes from a source of `kind`."""
    return index < len(instance.sources) and instance.sources[index].kind == kind


def _placeholder(graph: fx.Graph, name: str, meta: dict[str, Any]) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = dict(meta)
    return node


def _call(
    graph: fx.Graph, target: str, gm: fx.GraphModule, args: tuple[fx.Node, ...], path: str = ""
) -> list[fx.Node]:
    """Call a graph and pick all its results."""
    node = graph.call_module(target, args)
    values = output_nodes(gm)
    node.meta = {"val": tuple(v.meta["val"] for v in values), "module_path": path}
    results = []
    for index, value in enumerate(values):
        item = graph.call_function(operator.getitem, (node, index))
        keys = ("val", "placement", "grad_placement")
        item.meta = {k: value.meta[k] for k in keys if k in value.meta}
        item.meta["module_path"] = path
        results.append(item)
    return results


def _sum(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    node = graph.call_function(aten.add.Tensor, (left, right))
    node.meta = {**left.meta, "phase": "backward"}
    return node


def _add(graph: fx.Graph, table: dict[Any, fx.Node], key: Any, value: fx.Node) -> None:
    table[key] = _sum(graph, table[key], value) if key in table else value
