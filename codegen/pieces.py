"""Cut a graph at its communication into pure pieces, which a compiler can have.

    %a = aten.relu(%x)                     %piece_0 = call_module[piece_0](%x)
    %b = aten.mul(%a, 2)                   %ag = _c10d.all_gather(%piece_0, 2, 'tp')
    %ag = _c10d.all_gather(%b, 2, 'tp') -> %w = _c10d.wait_tensor(%ag)
    %w = _c10d.wait_tensor(%ag)            %piece_1 = call_module[piece_1](%w)
    %c = aten.neg(%w)                      return (%piece_1,)
    return (%c,)

Numerics: kept; the same ops in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from msc.ir import actions
from msc.ir.communication import FUSED, is_communication


def cut_at_communication(
    module: fx.GraphModule, apart: Callable[[fx.Node], Any] = lambda node: None
) -> fx.GraphModule:
    """A graph with the same placeholders and result that computes in pieces between communication.

    `module` calls no other graph. Each piece is a run of ops without communication or action; a
    piece returns the one value, or the tuple of values, that is read after it. apart: whether a
    call belongs in no piece, as one that has kernels of its own.
    """
    pieces = _pieces(module, apart)
    modules: dict[str, fx.GraphModule] = {}
    outer = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for index, piece in enumerate(pieces):
        if isinstance(piece, fx.Node):
            values[piece] = outer.node_copy(piece, values.__getitem__)
            continue
        name = f"piece_{index}"
        inside = set(piece)
        read = dict.fromkeys(i for node in piece for i in node.all_input_nodes if i not in inside)
        kept = [node for node in piece if any(user not in inside for user in node.users)]
        if not kept:
            continue
        modules[name] = _extract(module, piece, list(read), kept)
        call = outer.call_module(name, tuple(values[node] for node in read))
        call.meta["val"] = _packed([node.meta.get("val") for node in kept])
        for position, node in enumerate(kept):
            values[node] = call if len(kept) == 1 else _item(outer, call, position)
            values[node].meta = dict(node.meta)
    result = fx.GraphModule(dict[str, Any](modules), outer)
    result.meta = dict(module.meta)
    return result


def _item(graph: fx.Graph, call: fx.Node, position: int) -> fx.Node:
    return graph.call_function(operator.getitem, (call, position))


def _packed(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _pieces(
    module: fx.GraphModule, apart: Callable[[fx.Node], Any]
) -> list[fx.Node | list[fx.Node]]:
    """The nodes in order: those that stay outside alone, the others in runs."""
    found: list[fx.Node | list[fx.Node]] = []
    for node in module.graph.nodes:
        outside = node.op in ("placeholder", "output") or is_communication(node)
        if outside or node.target in actions.ACTIONS or _is_result(node, apart) or apart(node):
            found.append(node)
        elif found and isinstance(found[-1], list):
            found[-1].append(node)
        else:
            found.append([node])
    return found


def _is_result(node: fx.Node, apart: Callable[[fx.Node], Any]) -> bool:
    """Whether a node is one of several results of what stays outside: a piece cannot read those."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and bool(source.target in FUSED or apart(source))


def _extract(
    module: fx.GraphModule, piece: list[fx.Node], read: list[fx.Node], kept: list[fx.Node]
) -> fx.GraphModule:
    inner = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in read:
        values[node] = inner.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in piece:
        values[node] = inner.node_copy(node, values.__getitem__)
    inner.output(_packed([values[node] for node in kept]))
    return fx.GraphModule(module, inner)
