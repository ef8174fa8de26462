"""Put what a called graph does in place of the call, so that other work can go between it."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from msc.ir.call_paths import CallPaths
from msc.ir.communication import subgraph
from msc.ir.structure import placeholders


def open_call(gm: fx.GraphModule, call: fx.Node) -> tuple[Any, ...]:
    """Put the nodes of a called graph before the call; return what they give, nested as it was.

    Whoever picked a single result of the call reads that now. The call stays, for those who read a
    tuple of results whole; where there are none it is dead.
    """
    inner = subgraph(gm, call)
    paths = CallPaths().of(call, inner)
    opened = call.meta.get("opened", str(call.target))
    env: dict[fx.Node, fx.Node] = dict(zip(placeholders(inner), call.args, strict=True))  # type: ignore[arg-type]
    with gm.graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = copied = gm.graph.node_copy(node, env.__getitem__)
            copied.meta = {**paths.meta(node), "opened": opened}
            if node.op == "call_module":
                copied.target = _added(
                    gm, str(call.target), str(node.target), subgraph(inner, node)
                )
    outputs: Any = fx.map_arg(inner.graph.output_node().args[0], env.__getitem__)
    for picked in list(call.users):
        _replace(picked, outputs[picked.args[1]])
    return tuple(outputs)


def _replace(picked: fx.Node, value: Any) -> None:
    if isinstance(value, fx.Node):
        picked.replace_all_uses_with(value)
    elif isinstance(value, (tuple, list)):
        for user in list(picked.users):
            if user.target is operator.getitem:
                _replace(user, value[user.args[1]])  # type: ignore[index]


def _added(gm: fx.GraphModule, caller: str, name: str, graph: fx.GraphModule) -> str:
    """The name under which `gm` has a graph; chunks may have different ones of one name."""
    for free in (name, f"{caller}_{name}"):
        known = getattr(gm, free, None)
        if known is None:
            gm.add_submodule(free, graph)
        if known is None or known is graph:
            return free
    raise AssertionError(f"{caller} is opened twice, with different graphs")
