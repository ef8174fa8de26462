"""Which nodes of a graph communicate, and what is known of them without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed  # registers torch.ops._c10d_functional
from torch import fx

from msc.ir import actions
from msc.ir.errors import VerifyError
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.ir.values import operand_nodes, tensor_of, tensors_of

_c10d = torch.ops._c10d_functional

COLLECTIVES: dict[Any, str] = {
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_to_all_single.default: "all_to_all",
}
"""Start nodes of collectives, with the names that executors give them."""

FUSED: dict[Any, str] = {
    ALL_GATHER_MATMUL: "all_gather_matmul",
    MATMUL_REDUCE_SCATTER: "matmul_reduce_scatter",
}
"""Collectives that compute too, and are complete when they return, with executors' names for them.
They take part in the order of their group as a start and its wait would."""

MOVES = {"all_gather_matmul": "all_gather", "matmul_reduce_scatter": "reduce_scatter"}
"""The collective inside each of them."""

_ARGUMENTS = {"all_gather": 3, "reduce_scatter": 4, "all_reduce": 3, "all_to_all": 4}
_ARGUMENTS |= {"all_gather_matmul": 10, "matmul_reduce_scatter": 7}

WAITS: frozenset[Any] = frozenset({_c10d.wait_tensor.default, actions.wait})
POINT_TO_POINT: dict[Any, str] = {actions.send: "send", actions.recv: "recv"}
STARTS: dict[Any, str] = {**COLLECTIVES, **POINT_TO_POINT}


def is_communication(node: fx.Node) -> bool:
    """Whether a node starts or completes a communication, or both."""
    return node.op == "call_function" and (
        node.target in STARTS or node.target in WAITS or node.target in FUSED
    )


def collective_kind(node: fx.Node) -> str | None:
    """The name of the collective that a node starts, or is; None for any other node."""
    if node.op != "call_function":
        return None
    return COLLECTIVES.get(node.target) or FUSED.get(node.target)


def moved_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The value that a collective moves, on this rank's side and on the whole one's.

    Of a fused one it is what is gathered or summed, which may be no operand or result of it.
    """
    kind = FUSED.get(node.target)
    if kind is None:
        return [tensor for each in (*operand_nodes(node), node) for tensor in tensors_of(each)]
    size: Any = node.args[-2]
    if kind == "matmul_reduce_scatter":
        part = tensor_of(node)
        return [part.new_empty((size * part.shape[0], *part.shape[1:])), part]
    operand: Any = node.args[0]
    part = tensor_of(operand)
    return [part, part.new_empty((size * part.shape[0], *part.shape[1:]))]


def check_form(node: fx.Node) -> None:
    """Raise `VerifyError` for communication that is not written in the agreed form.

    Start nodes and fused ones have positional arguments only; of the functional collectives only
    those of `COLLECTIVES` exist in a rank graph.
    """
    if node.op != "call_function":
        return
    known = node.target in STARTS or node.target in WAITS
    if getattr(node.target, "namespace", "") == "_c10d_functional" and not known:
        names = ", ".join(str(target) for target in COLLECTIVES)
        raise VerifyError(f"%{node.name} calls {node.target}; a rank graph uses {names}.")
    kind = collective_kind(node)
    if kind is not None:
        whole = len(node.args) == _ARGUMENTS[kind] and not node.kwargs
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
    """The symbolic group of a collective's start node, or of a fused one."""
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
        if collective_kind(node) is not None
    }
    return tuple(sorted(names))


def fused_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The fused collectives of a program, each node of each of its graphs once."""
    return [
        node
        for graph_module in graphs_below(module)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target in FUSED
    ]


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
