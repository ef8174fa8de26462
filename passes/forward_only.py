"""The evaluation of a rank: its step without backward, gradients, optimizer and dropout.

Batch norm uses its running statistics, and no buffer changes.

    %f0 = chunk0_forward(..)                     %f0 = chunk0_forward(..)
    %s = send(%f0[0])                            %s = send(%f0[0])
    %t = recv(..)   a gradient             ->    wait(%s)
    %b0 = chunk0_backward(..)                    return {'loss': ..}
    %p = adam(..)
    return {'loss': .., 'parameters': %p}

Numerics: the loss is kept bit for bit where the model has no dropout; dropout becomes the identity.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  registers torch.ops.msc
from msc.ir import actions
from msc.ir.communication import subgraph

aten = torch.ops.aten

_CHUNK_FORWARD = re.compile(r"chunk\d+_forward")


def forward_only(rank_graph: fx.GraphModule) -> fx.GraphModule:
    """A rank graph that computes the loss alone; the given one and what it calls stay as they are.

    Its output is `{"loss": loss}`. Every rank of a mesh must run it: the messages of the forward
    passes are those of the step, in their order.
    """
    unchanged = _unchanged_buffers(rank_graph)
    kept = _forward_nodes(rank_graph, unchanged)
    copies: dict[int, fx.GraphModule] = {}
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    modules: dict[str, fx.GraphModule] = {}
    for node in rank_graph.graph.nodes:
        if node not in kept:
            continue
        if node in unchanged:
            nodes[node] = nodes[unchanged[node]]
            continue
        nodes[node] = copy = graph.node_copy(node, nodes.__getitem__)
        if node.op == "call_module":
            target = str(node.target)
            modules[target] = _inference(subgraph(rank_graph, node), copies)
            if _is_forward(node):
                modules[target] = _without_saved(modules[target])
                copy.meta["val"] = (*copy.meta["val"][:2], ())
    graph.output({"loss": nodes[_loss(rank_graph)]})
    return fx.GraphModule(modules, graph)


def _loss(rank_graph: fx.GraphModule) -> fx.Node:
    output = rank_graph.graph.output_node().args[0]
    assert isinstance(output, dict)
    loss = output["loss"]
    assert isinstance(loss, fx.Node)
    return loss


def _is_forward(node: fx.Node) -> bool:
    """Whether a call runs the forward graph of a chunk (see `build_rank_graph`)."""
    return node.op == "call_module" and _CHUNK_FORWARD.fullmatch(str(node.target)) is not None


def _is_backward(node: fx.Node) -> bool:
    """Whether a node is a call of a backward, or is of one that was opened."""
    called = str(node.target) if node.op == "call_module" else ""
    return str(node.meta.get("opened", called)).endswith("_backward")


def _unchanged_buffers(rank_graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Buffers as a forward has written them -> as the step got them."""
    given = {
        node.meta["name"]: node
        for node in rank_graph.graph.find_nodes(op="placeholder")
        if node.meta["kind"] == "buffer"
    }
    found = {}
    for call in rank_graph.graph.find_nodes(op="call_module"):
        for results in call.users if _is_forward(call) else ():
            if results.args[1] == 3:
                for item in results.users:
                    name = call.meta["buffers"][item.args[1]]
                    if name in given:
                        found[item] = given[name]
    return found


def _forward_nodes(rank_graph: fx.GraphModule, unchanged: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """What the loss and the messages of the forward passes need."""
    after_backward: set[fx.Node] = set()
    sends: list[fx.Node] = []
    for node in rank_graph.graph.nodes:
        if _is_backward(node) or any(i in after_backward for i in node.all_input_nodes):
            after_backward.add(node)
        elif node.op == "call_function" and node.target is actions.send:
            sends.append(node)
    loss = _loss(rank_graph)
    assert loss not in after_backward
    waits = [user for send in sends for user in send.users if user.target is actions.wait]
    pending = [loss, *sends, *waits]
    kept: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in kept:
            kept.add(node)
            pending += [unchanged[node]] if node in unchanged else node.all_input_nodes
    return kept


def _copy(gm: fx.GraphModule, modules: dict[str, fx.GraphModule]) -> fx.GraphModule:
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    graph.output(result)
    copy = fx.GraphModule(modules, graph)
    copy.meta = dict(gm.meta)
    return copy


def _inference(gm: fx.GraphModule, copies: dict[int, fx.GraphModule]) -> fx.GraphModule:
    """A graph with all that it calls, without dropout; graphs that are called twice stay one."""
    if id(gm) not in copies:
        called = {
            str(node.target): _inference(subgraph(gm, node), copies)
            for node in gm.graph.nodes
            if node.op == "call_module"
        }
        copy = _copy(gm, called)
        _drop_dropout(copy)
        _use_running_statistics(copy)
        copies[id(gm)] = copy
    return copies[id(gm)]


def _drop_dropout(gm: fx.GraphModule) -> None:
    found = gm.graph.find_nodes(op="call_function", target=torch.ops.msc.dropout.default)
    for node in found:
        with gm.graph.inserting_before(node):
            # a copy, contiguous as dropout's result is: later views rely on it
            same = gm.graph.call_function(
                aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
            )
        same.meta = dict(node.meta)
        node.replace_all_uses_with(same)
        gm.graph.erase_node(node)
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _use_running_statistics(gm: fx.GraphModule) -> None:
    found = gm.graph.find_nodes(op="call_function", target=torch.ops.msc.training_value.default)
    for node in found:
        node.replace_all_uses_with(node.args[1])
        gm.graph.erase_node(node)
    if found:
        gm.recompile()


def _without_saved(gm: fx.GraphModule) -> fx.GraphModule:
    """A chunk's forward that keeps nothing for the backward."""
    output = gm.graph.output_node()
    results: Any = output.args[0]
    sent, loss, *_ = results
    output.args = ((sent, loss, ()),)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
