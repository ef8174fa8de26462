"""Which nodes of a graph communicate, and what is known of them without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed  # registers torch.ops._c10d_functional
from torch import fx

from msc.ir import actions
from msc.ir.errors import VerifyError

_c10d = torch.ops._c10d_functional

COLLECTIVES: dict[Any, str] = {
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_to_all_single.default: "all_to_all",
}
"""Start nodes of collectives, with the names that executors give them."""

_ARGUMENTS = {"all_gather": 3, "reduce_scatter": 4, "all_reduce": 3, "all_to_all": 4}

WAITS: frozenset[Any] = frozenset({_c10d.wait_tensor.default, actions.wait})
POINT_TO_POINT: dict[Any, str] = {actions.send: "send", actions.recv: "recv"}
STARTS: dict[Any, str] = {**COLLECTIVES, **POINT_TO_POINT}


def is_communication(node: fx.Node) -> bool:
    """Whether a node starts or completes a communication."""
    return node.op == "call_function" and (node.target in STARTS or node.target in WAITS)


def check_form(node: fx.Node) -> None:
    """Raise `VerifyError` for communication that is not written in the agreed form.

    Start nodes have positional arguments only; of the functional collectives only those of
    `COLLECTIVES` exist in a rank graph.
    """
    if node.op != "call_function":
        return
    known = node.target in STARTS or node.target in WAITS
    if getattr(node.target, "namespace", "") == "_c10d_functional" and not known:
        names = ", ".join(str(target) for target in COLLECTIVES)
        raise VerifyError(f"%{node.name} calls {node.target}; a rank graph uses {names}.")
    if node.target in COLLECTIVES:
        whole = len(node.args) == _ARGUMENTS[COLLECTIVES[node.target]] and not node.kwargs
        if not whole or not isinstance(node.args[-1], str):
            raise VerifyError(
                f"%{node.name} = {node.target} must have all arguments by position, the last one "
                f"the symbolic name of its group; it has {node.args} and {dict(node.kwargs)}."
            )
    elif node.target in POINT_TO_POINT:
        count = 3 if node.target is actions.send else 4
        if len(node.args) != count or node.kwargs:
            name = POINT_TO_POINT[node.target]
            raise VerifyError(f"%{node.name} = {name} takes {count} arguments, all by position.")


def group_of(node: fx.Node) -> str:
    """The symbolic group of a collective's start node."""
    return str(node.args[-1])


def subgraph(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """The graph that a `call_module` node calls; `VerifyError` if it is no graph."""
    child = module.get_submodule(str(node.target))
    if not isinstance(child, fx.GraphModule):
        raise VerifyError(
            f"%{node.name} calls '{node.target}', a {type(child).__name__}; "
            "a rank graph calls graphs only."
        )
    if node.kwargs:
        raise VerifyError(f"%{node.name} calls '{node.target}' with keywords; use positions.")
    return child


def graphs_below(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`module` and all graphs that it calls, each object once, callees first."""
    seen: set[int] = set()

    def visit(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
        if id(graph_module) in seen:
            return
        seen.add(id(graph_module))
        for node in graph_module.graph.nodes:
            if node.op == "call_module":
                yield from visit(subgraph(graph_module, node))
        yield graph_module

    return visit(module)


def used_groups(module: fx.GraphModule) -> tuple[str, ...]:
    """Symbolic names of the groups that a program's collectives use, sorted."""
    names = {
        group_of(node)
        for graph_module in graphs_below(module)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target in COLLECTIVES
    }
    return tuple(sorted(names))


def used_channels(module: fx.GraphModule) -> tuple[tuple[str, int], ...]:
    """The channels that a program sends or receives on, each with the pp coordinate of the peer."""
    found = {
        (str(node.args[2] if node.target is actions.send else node.args[1]), _stage(node))
        for graph_module in graphs_below(module)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target in POINT_TO_POINT
    }
    return tuple(sorted(found))


def _stage(node: fx.Node) -> int:
    return int(node.args[1 if node.target is actions.send else 0])  # type: ignore[arg-type]
