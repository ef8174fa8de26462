"""A small builder of rank graphs for tests."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed  # registers the functional collectives
from torch import fx

from msc.ir import actions

C10D = torch.ops._c10d_functional
ATEN = torch.ops.aten


class Builder:
    """Writes a graph node by node; `val` of each op comes from running it on meta tensors."""

    def __init__(self, module_path: str = "") -> None:
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        self._path = module_path

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(
        self, target: Callable[..., Any], *args: Any, val: Any = None, **kwargs: Any
    ) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda operand: operand.meta.get("val"))
        if val is None and target in RESULTS:
            val = RESULTS[target](*values)
        elif val is None and target not in actions.ACTIONS:
            val = target(*values, **named)
        node.meta["val"] = val
        if self._path:
            node.meta["module_path"] = self._path
        return node

    def collective(self, target: Any, value: fx.Node, *args: Any) -> fx.Node:
        """A start node and its wait; returns the wait."""
        return self.wait(self.call(target, value, *args))

    def wait(self, start: fx.Node) -> fx.Node:
        return self.call(C10D.wait_tensor.default, start)

    def graph_call(self, name: str, module: fx.GraphModule, *args: Any) -> fx.Node:
        self.modules[name] = module
        node = self.graph.call_module(name, args)
        result = module.graph.output_node().args[0]
        node.meta["val"] = fx.map_arg(result, lambda inner: inner.meta["val"])
        return node

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, value, index)

    def done(self, *results: Any) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(dict[str, Any](self.modules), self.graph)


def _longer(value: Any, factor: int) -> Any:
    return value.new_empty((value.shape[0] * factor, *value.shape[1:]))


RESULTS: dict[Any, Callable[..., Any]] = {
    C10D.all_gather_into_tensor.default: lambda value, size, group: _longer(value, size),
    C10D.reduce_scatter_tensor.default: lambda value, op, size, group: value.new_empty(
        (value.shape[0] // size, *value.shape[1:])
    ),
    C10D.all_reduce.default: lambda value, op, group: value,
    C10D.all_to_all_single.default: lambda value, received, sent, group: value.new_empty(
        (sum(received), *value.shape[1:])
    ),
    C10D.wait_tensor.default: lambda value: value,
    actions.recv: lambda stage, channel, shapes, dtypes: tuple(
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ),
    actions.wait: lambda value: value,
    actions.accumulate: lambda total, parts: tuple(parts),
}


def all_gather(build: Builder, value: fx.Node, size: int, group: str) -> fx.Node:
    return build.collective(C10D.all_gather_into_tensor.default, value, size, group)


def all_reduce(build: Builder, value: fx.Node, group: str, op: str = "sum") -> fx.Node:
    return build.collective(C10D.all_reduce.default, value, op, group)


def reduce_scatter(build: Builder, value: fx.Node, size: int, group: str) -> fx.Node:
    return build.collective(C10D.reduce_scatter_tensor.default, value, "sum", size, group)


def send(build: Builder, values: Sequence[fx.Node], stage: int, channel: str) -> fx.Node:
    return build.call(actions.send, tuple(values), stage, channel)


def recv(
    build: Builder,
    stage: int,
    channel: str,
    *shapes: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> fx.Node:
    types = (tuple(map(tuple, shapes)), (dtype,) * len(shapes))
    return build.call(actions.recv, stage, channel, *types)
