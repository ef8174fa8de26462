"""What the graphs of a program send, and what the cost model says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from msc.cost import CostModel
from msc.cost.flops import nbytes
from msc.explanation.facts import Total
from msc.ir.communication import MOVES, collective_kind, moved_tensors
from msc.ir.groups import Group
from msc.ir.mesh import Mesh
from msc.ir.values import tensors_of


def totals(
    rank_graphs: Sequence[fx.GraphModule], names: Sequence[str], cost: CostModel | None, mesh: Mesh
) -> tuple[Total, ...]:
    """All that one rank of each class sends in a step; priced where there is a cost model.

    names: of the classes. Those that follow each other and send the same are one.
    """
    memo: dict[int, Sent] = {}
    stages: list[tuple[str, str, list[Total]]] = []  # first, last, what each of them sends
    for name, gm in zip(names, rank_graphs, strict=True):
        rows = _rows(_sent(gm, memo), cost, mesh)
        if stages and stages[-1][2] == rows:
            stages[-1] = (stages[-1][0], name, rows)
        else:
            stages.append((name, name, rows))
    return tuple(
        replace(row, stage=first if first == last else f"{first} to {last}")
        for first, last, rows in stages
        for row in rows
    )


Sent = dict[tuple[str, str, int], int]
"""(group, kind, bytes) -> calls."""


def _rows(sent: Sent, cost: CostModel | None, mesh: Mesh) -> list[Total]:
    """What is sent, by group and kind."""
    sums: dict[tuple[str, str], Total] = {}
    for (group, kind, size), calls in sorted(sent.items()):
        had = sums.get((group, kind), Total("", group, kind, 0, 0, None if cost is None else 0.0))
        price = None
        if cost is not None and had.cost is not None:
            sending = kind == "send"
            one = cost.send(size) if sending else collective_cost(kind, size, group, cost, mesh)
            price = had.cost + calls * one
        sums[group, kind] = replace(
            had, calls=had.calls + calls, nbytes=had.nbytes + calls * size, cost=price
        )
    return list(sums.values())


def _sent(gm: fx.GraphModule, memo: dict[int, Sent]) -> Sent:
    """What a graph sends, and those that it calls."""
    if id(gm) in memo:
        return memo[id(gm)]
    found: Sent = {}
    for node in gm.graph.nodes:
        inner: Sent = {}
        if node.op == "call_module":
            called = gm.get_submodule(str(node.target))
            assert isinstance(called, fx.GraphModule)
            inner = _sent(called, memo)
        elif (kind := collective_kind(node)) is not None:
            inner = {(str(node.args[-1]), kind, payload_bytes(node)): 1}
        elif getattr(node.target, "__name__", "") == "send":
            size = sum(nbytes(t) for o in node.all_input_nodes for t in tensors_of(o))
            inner = {("pp", "send", size): 1}
        for key, calls in inner.items():
            found[key] = found.get(key, 0) + calls
    memo[id(gm)] = found
    return found


def payload_bytes(node: fx.Node) -> int:
    """Bytes of the whole value that a collective moves: the larger of its two sides."""
    return max(map(nbytes, moved_tensors(node)))


def collective_cost(kind: str, size: int, group: str, cost: CostModel, mesh: Mesh) -> float:
    """Modelled cost of one call on a group, such as `tp`, `dp,tp` or `pp[0,3]`.

    Of a fused collective what it costs unfused: how much of it is hidden `Program.simulate` says.
    """
    return cost.collective(MOVES.get(kind, kind), size, Group.parse(group).size(mesh))
