"""The communication of one step of a rank, in order, as its rank graph says it without running."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from msc.ir import actions
from msc.ir.communication import COLLECTIVES, FUSED, STARTS, WAITS, group_of
from msc.ir.groups import Group
from msc.ir.inline import inline
from msc.ir.mesh import Mesh
from msc.ir.values import tensors_of

WAIT = "wait"


@dataclass(frozen=True)
class Act:
    """A communication that a rank starts, or waits for.

    kind: all_gather and so on, send, recv, or wait. channel: which ranks communicate, the same text
    on all of them (`collective_channel`, `message_channel`). nbytes: what this rank gives, or
    receives. site: where in the program. started: for a wait, the place of the start in the step.
    """

    kind: str
    channel: str
    nbytes: int
    site: str
    started: int = -1


def collective_channel(group: str, members: Iterable[int]) -> str:
    """The ranks of a group: "tp:2,3"."""
    return f"{group}:{','.join(map(str, members))}"


def message_channel(channel: str, source: int, target: int) -> str:
    """One direction between two ranks: "forward:0>4"."""
    return f"{channel}:{source}>{target}"


def members_of(channel: str) -> tuple[int, ...]:
    """The ranks of a channel; of messages, the sender first."""
    ranks = channel.rpartition(":")[2]
    return tuple(map(int, ranks.replace(">", ",").split(",")))


def schedule_of(rank_graph: fx.GraphModule, mesh: Mesh, rank: int) -> list[Act]:
    """What `rank` starts and waits for in a step; groups of one rank communicate nothing."""
    acts: list[Act] = []
    places: dict[fx.Node, int] = {}
    for node in inline(rank_graph).graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in STARTS:
            channel = _channel(node, mesh, rank)
            if len(members_of(channel)) > 1:
                places[node] = len(acts)
                acts.append(Act(STARTS[node.target], channel, _nbytes(node), _site(node)))
        elif node.target in FUSED:
            channel = _channel(node, mesh, rank)
            if len(members_of(channel)) > 1:
                start = Act(FUSED[node.target], channel, _nbytes(node), _site(node))
                acts += [start, replace(start, kind=WAIT, started=len(acts))]
        elif node.target in WAITS and node.args[0] in places:
            place = places[node.args[0]]
            start = acts[place]
            acts.append(Act(WAIT, start.channel, start.nbytes, start.site, place))
    return acts


def _channel(node: fx.Node, mesh: Mesh, rank: int) -> str:
    if node.target in COLLECTIVES or node.target in FUSED:
        group = group_of(node)
        return collective_channel(group, Group.parse(group).members(mesh, rank))
    sends = node.target is actions.send
    stage, channel = (node.args[1], node.args[2]) if sends else (node.args[0], node.args[1])
    peer = mesh.rank({**mesh.coordinate(rank), "pp": stage})  # type: ignore[dict-item]
    pair = (rank, peer) if sends else (peer, rank)
    return message_channel(str(channel), *pair)


def _nbytes(node: fx.Node) -> int:
    if node.target is actions.recv:
        shapes, dtypes = node.args[2], node.args[3]
        return sum(
            _numel(shape) * dtype.itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)  # type: ignore[arg-type]
        )
    given: Any = node.args[0]
    found = given if isinstance(given, (tuple, list)) else [given]
    return sum(
        tensor.numel() * tensor.element_size() for each in found for tensor in tensors_of(each)
    )


def _numel(shape: Iterable[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _site(node: fx.Node) -> str:
    path = node.meta.get("module_path")
    return f"%{node.name}" + (f" ({path})" if path else "")


def to_text(acts: Iterable[Act]) -> str:
    """As JSON."""
    return json.dumps([list(asdict(act).values()) for act in acts])


def from_text(text: str) -> list[Act]:
    """What `to_text` gave."""
    return [Act(*values) for values in json.loads(text)]
