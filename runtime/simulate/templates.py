"""A graph as what its simulation needs: stretches of computing between communication and calls.

    %h = aten.mm(%x, %w)                     Compute(2 ms)
    %y = aten.relu(%h)                       Start(%r, all_reduce on 'tp', 1 MB)
    %r = c10d.all_reduce(%y, 'sum', 'tp') -> Compute(1 ms)
    %z = aten.mm(%x, %v)                     Wait(%r)
    %s = c10d.wait_tensor(%r)

A graph that is called often (equal layers, micro-batches) is made into a template once.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from msc.cost import Cluster
from msc.cost.flops import nbytes
from msc.cost.fused import FusedCall, fused_call
from msc.cost.roofline import Work
from msc.ir import actions
from msc.ir.communication import (
    COLLECTIVES,
    FUSED,
    POINT_TO_POINT,
    STARTS,
    WAITS,
    check_form,
    group_of,
    subgraph,
)
from msc.ir.structure import layer_of, placeholders
from msc.ir.values import tensors_of
from msc.runtime.simulate.durations import work_of


@dataclass(frozen=True, slots=True)
class Compute:
    """Nodes that keep the compute stream busy for a time; `label` is the longest of them."""

    seconds: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """A communication that a node starts; `stage` is the pp coordinate of a send's or recv's peer.

    name: of the group or channel. payload_bytes: of the whole value of a collective, or of the
    message. module: path of the module that it is part of, inside its layer.
    """

    node: fx.Node
    kind: str
    name: str
    payload_bytes: int
    stage: int | None
    module: str


@dataclass(frozen=True, slots=True)
class Fused:
    """A collective that computes beside what it moves; busy: seconds of computing alone."""

    start: Start
    call: FusedCall
    busy: float
    label: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream waits for the communication that `source` holds."""

    source: fx.Node


@dataclass(frozen=True, slots=True)
class Call:
    """A called graph. passed: its placeholders that hold communications, and what they are here."""

    node: fx.Node
    template: Template
    passed: tuple[tuple[fx.Node, fx.Node], ...]
    label: str


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a called graph's results, as `getitem` picks it."""

    node: fx.Node
    source: fx.Node
    index: int


Step = Compute | Start | Fused | Wait | Call | Item


@dataclass(frozen=True, slots=True)
class Template:
    """Steps of a graph, and the totals of it and of what it calls.

    positions: for each node of the graph, its step, and seconds since that began.
    needs: placeholders whose communications the graph waits for.
    result: nodes that the graph returns, nested, if communications that it started are among them.
    seconds, flops: of computing, without waits; FLOPs on the matrix units by dtype.
    """

    steps: tuple[Step, ...]
    positions: tuple[tuple[int, float], ...]
    needs: frozenset[fx.Node]
    result: Any
    seconds: float
    flops: Counter[torch.dtype]


class Templates:
    """Makes templates, each graph's once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[int, Template] = {}
        self._kept: list[fx.GraphModule] = []  # ids stay theirs

    def of(self, graph: fx.GraphModule) -> Template:
        """The template of a graph; `VerifyError` for a node that no executor runs."""
        known = self._made.get(id(graph))
        if known is None:
            known = self._made[id(graph)] = _Builder(self, graph, self._cluster).build()
            self._kept.append(graph)
        return known


class _Builder:
    def __init__(self, templates: Templates, graph: fx.GraphModule, cluster: Cluster) -> None:
        self.templates = templates
        self.graph = graph
        self.cluster = cluster
        self.steps: list[Step] = []
        self.open = 0.0  # seconds of the stretch that no step has yet
        self.label = ""
        self.longest = 0.0
        self.seconds = 0.0
        self.flops: Counter[torch.dtype] = Counter()
        self.carriers: set[fx.Node] = set()  # nodes that hold communications
        self.needs: set[fx.Node] = set()

    def build(self) -> Template:
        positions: list[tuple[int, float]] = []
        for node in self.graph.graph.nodes:
            check_form(node)
            if node.op == "call_module":
                self._call(node)
            elif node.op == "call_function" and node.target in STARTS:
                self._start(node)
            elif node.op == "call_function" and node.target in FUSED:
                self._fused(node)
            elif node.op == "call_function" and node.target in WAITS:
                self._wait(node)
            elif node.target is operator.getitem and node.args[0] in self.carriers:
                self.carriers.add(node)
                self._step(Item(node, *node.args))
            else:
                positions.append((len(self.steps), self.open))
                self._compute(node, work_of(node))
                continue
            positions.append((len(self.steps) - 1, 0.0))
        self._close()
        (result,) = self.graph.graph.output_node().args
        carried = {leaf for leaf in pytree.tree_leaves(result) if leaf in self.carriers}
        return Template(
            tuple(self.steps),
            tuple(positions),
            frozenset(self.needs),
            result if carried else None,
            self.seconds,
            self.flops,
        )

    def _compute(self, node: fx.Node, work: Work) -> None:
        seconds = work.seconds(self.cluster)
        self.seconds += seconds
        self.open += seconds
        if seconds > self.longest:
            self.longest, self.label = seconds, _label(node, module_in_layer(node))
        if work.dtype is not None:
            self.flops[work.dtype] += int(work.flops)

    def _close(self) -> None:
        if self.open:
            self.steps.append(Compute(self.open, self.label))
        self.open, self.label, self.longest = 0.0, "", 0.0

    def _step(self, step: Step) -> None:
        self._close()
        self.steps.append(step)

    def _call(self, node: fx.Node) -> None:
        callee = subgraph(self.graph, node)
        template = self.templates.of(callee)
        passed = tuple(
            (inner, arg)
            for inner, arg in zip(placeholders(callee), node.args, strict=True)
            if inner in template.needs and isinstance(arg, fx.Node)
        )
        self._need(arg for _, arg in passed)
        if template.result is not None:
            self.carriers.add(node)
        self.seconds += template.seconds
        self.flops.update(template.flops)
        self._step(Call(node, template, passed, _label(node, node.meta.get("module_path") or "")))

    def _need(self, sources: Any) -> None:
        self.needs.update(source for source in sources if source.op == "placeholder")

    def _wait(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        self._need([source])
        self._step(Wait(source))

    def _fused(self, node: fx.Node) -> None:
        call = fused_call(node)
        busy = call.seconds(self.cluster, 0.0)
        self.seconds += busy
        self.flops[call.dtype] += int(call.flops)
        kind, module = FUSED[node.target], module_in_layer(node)
        start = Start(node, kind, group_of(node), call.moved_bytes, None, module)
        self._step(Fused(start, call, busy, _label(node, module)))

    def _start(self, node: fx.Node) -> None:
        self.carriers.add(node)
        operands: Any = node.args
        if node.target in COLLECTIVES:
            sizes = [nbytes(t) for each in (operands[0], node) for t in tensors_of(each)]
            kind, name, stage = COLLECTIVES[node.target], group_of(node), None
            payload = sizes[0] if kind == "all_to_all" else max(sizes)
        elif node.target is actions.send:
            values, stage, name = operands
            kind = POINT_TO_POINT[node.target]
            payload = sum(nbytes(t) for value in values for t in tensors_of(value))
        else:
            stage, name, shapes, dtypes = operands
            kind = POINT_TO_POINT[node.target]
            payload = sum(
                torch.Size(shape).numel() * dtype.itemsize
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
        self._step(Start(node, kind, name, payload, stage, module_in_layer(node)))


def _label(node: fx.Node, path: str) -> str:
    return f"{node.name} ({path})" if path else node.name


def module_in_layer(node: fx.Node) -> str:
    """A node's module path without its layer, which is that of the first of equal layers."""
    path: str = node.meta.get("module_path") or ""
    layer = layer_of(path)
    if layer is None:
        return path
    container, index = layer
    return path.removeprefix(f"{container}.").removeprefix(str(index)).removeprefix(".")
