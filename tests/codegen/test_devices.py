"""Creation ops get the rank's device; everything else stays as it is."""

from __future__ import annotations

import torch
from torch import fx

from msc.codegen.devices import on_device
from msc.codegen.emit import emit

aten = torch.ops.aten


def _leaf() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    count = graph.call_function(aten.arange.default, (4,), {"dtype": torch.int64})
    zeros = graph.call_function(aten.zeros_like.default, (x,))
    graph.output((graph.call_function(aten.add.Tensor, (zeros, count)),))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4)
    return fx.GraphModule({}, graph)


def test_only_ops_that_read_no_tensor_are_told_the_device() -> None:
    leaf = _leaf()
    outer = fx.Graph()
    x = outer.placeholder("x")
    calls = [outer.call_module("leaf", (x,)) for _ in range(2)]
    outer.output(tuple(calls))
    for node in outer.nodes:
        node.meta["val"] = torch.empty(4)
    rank = fx.GraphModule({"leaf": leaf}, outer)

    placed = on_device(rank, torch.device("meta"))

    inner = placed.get_submodule("leaf")
    assert isinstance(inner, fx.GraphModule)
    told = {n.name: n.kwargs.get("device") for n in inner.graph.nodes if n.op == "call_function"}
    assert told == {
        "arange_default": torch.device("meta"),
        "zeros_like_default": None,
        "add_tensor": None,
    }
    assert emit(placed, "process").source.count("def leaf") == 1
    assert all("device" not in n.kwargs for n in leaf.graph.nodes)
