"""A rank-local graph under construction: nodes with fake values and placements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from msc.ir.placement import REPLICATED, Placement
from msc.ir.torch_private import OpOverload
from msc.ir.values import carry
from msc.passes.sharding.axes import Axis, States, local_shape


class LocalGraph:
    """Appends nodes to a new graph and works out their values on fake tensors.

    coordinates: the mesh coordinates that the graph reads, each a placeholder after all others.
    conversion: what the calls that are appended now are there to convert (`meta["conversion"]`).
    """

    def __init__(self, axes: Sequence[Axis], fake_mode: Any) -> None:
        self.axes = tuple(axes)
        self.graph = fx.Graph()
        self.coordinates: dict[str, fx.Node] = {}
        self.conversion: tuple[str, int, str, str, str] | None = None
        self._fake_mode = fake_mode
        self._last_placeholder: fx.Node | None = None

    def placeholder(self, node: fx.Node, states: States) -> fx.Node:
        """The local part of another graph's placeholder."""
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        value = node.meta["val"]
        with self._fake_mode:
            shape = local_shape(value.shape, states, self.axes)
            new.meta["val"] = torch.empty(shape, dtype=value.dtype)
        self.describe(new, states, bool(node.meta.get("differentiable")))
        self._last_placeholder = new
        return new

    def coordinate(self, axis: str) -> fx.Node:
        """The rank's coordinate on an axis: a placeholder, made when it is first needed."""
        if axis not in self.coordinates:
            anchor = self._last_placeholder
            where = self.graph.inserting_after(anchor) if anchor is not None else None
            if where is None:
                where = self.graph.inserting_before(next(iter(self.graph.nodes)))
            with where:
                node = self.graph.placeholder(f"coordinate_{axis}")
            with self._fake_mode:
                node.meta["val"] = torch.empty((), dtype=torch.int64)
            node.meta.update(kind="coordinate", name=axis, differentiable=False)
            self.coordinates[axis] = node
            self._last_placeholder = node
        return self.coordinates[axis]

    def call(self, target: Any, *args: Any, source: fx.Node, **kwargs: Any) -> fx.Node:
        """Append a call; its value comes from running it on fake tensors.

        A rule may localize to a plain function of several ops: its ops are appended one by one.
        """
        if not isinstance(target, OpOverload) and target is not operator.getitem:
            return self._inlined(target, args, kwargs, source)
        node = self.graph.call_function(target, args, kwargs)
        self._run_fake(node)
        if self.conversion is not None:
            node.meta["conversion"] = self.conversion
        return carry(source, node)

    def _run_fake(self, node: fx.Node) -> None:
        with self._fake_mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    def _inlined(self, function: Any, args: Any, kwargs: Any, source: fx.Node) -> fx.Node:
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        before = set(self.graph.nodes)

        def proxy(node: fx.Node) -> Any:
            return fx.Proxy(node, tracer)

        proxies: Any = fx.map_arg((args, kwargs), proxy)
        result = function(*proxies[0], **proxies[1])
        for node in self.graph.nodes:
            if node not in before:
                self._run_fake(node)
                carry(source, node)
                node.meta.setdefault("differentiable", bool(source.meta.get("differentiable")))
        assert isinstance(result, fx.Proxy)
        return result.node

    def describe(self, node: fx.Node, states: States, has_gradient: bool) -> None:
        """Note the placements of a value, and of its gradient if it has one."""
        placement: dict[str, Placement] = {}
        gradient: dict[str, Placement] = {}
        for axis, state in zip(self.axes, states, strict=True):
            if state.value != REPLICATED.value:
                placement[axis.name] = state.value
            if has_gradient and state.grad != REPLICATED.value:
                gradient[axis.name] = state.grad
        node.meta["placement"] = placement
        node.meta["differentiable"] = has_gradient
        if has_gradient:
            node.meta["grad_placement"] = gradient

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        """The graph that returns `outputs`, without what nobody reads."""
        self.graph.output(tuple(outputs))
        gm = fx.GraphModule({}, self.graph)
        gm.graph.eliminate_dead_code()
        for axis, node in list(self.coordinates.items()):
            if not node.users:
                gm.graph.erase_node(node)
                del self.coordinates[axis]
        gm.recompile()
        return gm
