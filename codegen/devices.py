"""Give ops that create tensors the device of the rank: the graph itself names none."""

from __future__ import annotations

import torch
from torch import fx

from msc.ir.torch_private import OpOverload, argument_names


def on_device(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a rank graph, and of the graphs that it calls, that creates tensors on `device`.

    Graphs that are called in several places stay one object.
    """
    return _copy(gm, device, {})


def _copy(
    gm: fx.GraphModule, device: torch.device, known: dict[int, fx.GraphModule]
) -> fx.GraphModule:
    if id(gm) in known:
        return known[id(gm)]
    modules: dict[str, fx.GraphModule] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        callee = gm.get_submodule(str(node.target))
        assert isinstance(callee, fx.GraphModule)
        modules[str(node.target)] = _copy(callee, device, known)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if _creates(node):
            copies[node].kwargs = {**copies[node].kwargs, "device": device}
    result = fx.GraphModule(modules, graph)
    result.meta = dict(gm.meta)
    known[id(gm)] = result
    return result


def _creates(node: fx.Node) -> bool:
    """Whether a node makes a tensor of its own accord: it reads none, and can be told a device."""
    return (
        isinstance(node.target, OpOverload)
        and not node.all_input_nodes
        and "device" in argument_names(node.target)
    )
