"""Simulate one rank of each color, without tensors (see `msc.passes.check_communication`)."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msc.ir import actions
from msc.ir.communication import (
    FUSED,
    POINT_TO_POINT,
    WAITS,
    collective_kind,
    group_of,
    moved_tensors,
    subgraph,
)
from msc.ir.errors import CommunicationError, VerifyError
from msc.ir.values import DTYPE_NAMES, describe, tensor_of
from msc.passes.rank_colors import Colors


@dataclass(eq=False)
class Operation:
    """One communication that a color's ranks have started."""

    color: int
    kind: str
    signature: Hashable  # what all sides must agree on
    communicator: tuple[str, tuple[int, ...]]  # group or channel, and the colors of its members
    number: int  # position on the communicator
    text: str
    site: str
    done: bool = False

    def __str__(self) -> str:
        return f"{self.text} at {self.site}"


Walk = Generator[Operation, None, Any]


class Simulation:
    """Runs one program per color until all end, or raises `CommunicationError`."""

    def __init__(self, colors: Colors, programs: Sequence[fx.GraphModule]) -> None:
        self._colors = colors
        self._programs = programs
        self._queues: defaultdict[tuple[Any, int], deque[Operation]] = defaultdict(deque)
        self._numbers: Counter[tuple[Any, int]] = Counter()
        self._between = [
            frozenset(name for name, members in groups.items() if len(members) > 1)
            for groups in colors.groups
        ]
        self._steps: dict[tuple[int, frozenset[str]], list[fx.Node]] = {}
        self._waiting: dict[int, Operation] = {}

    def run(self) -> None:
        """Step every color as far as it goes, until all have ended."""
        walks = [self._walk(color, graph, (), "") for color, graph in enumerate(self._programs)]
        able = deque(range(len(walks)))
        while able:
            color = able.popleft()
            for operation in walks[color]:
                if not operation.done:
                    self._waiting[color] = operation
                    break
            for other, operation in list(self._waiting.items()):
                if operation.done:
                    del self._waiting[other]
                    able.append(other)
        if self._waiting or any(self._queues.values()):
            raise CommunicationError(self._report())

    def _walk(self, color: int, graph: fx.GraphModule, args: tuple[Any, ...], path: str) -> Walk:
        """Yield what a graph waits for; return its result with operations in place of tokens."""
        values: dict[fx.Node, Any] = {}
        arguments = iter(args)
        for node in self._relevant(color, graph):
            if node.op == "placeholder":
                values[node] = next(arguments, None)
            elif node.op == "call_module":
                own = tuple(_tokens(arg, values) for arg in node.args)
                inner = f"{path}{node.target}/"
                values[node] = yield from self._walk(color, subgraph(graph, node), own, inner)
            elif node.op == "output":
                return _tokens(node.args[0], values)
            elif node.target in WAITS:
                operation = _tokens(node.args[0], values)
                if isinstance(operation, Operation) and not operation.done:
                    yield operation
            elif node.target is operator.getitem:
                whole = _tokens(node.args[0], values)
                index: Any = node.args[1]
                values[node] = whole[index] if isinstance(whole, tuple) else None
            else:
                values[node] = operation = self._start(color, node, path)
                if node.target in FUSED and not operation.done:
                    yield operation
        return None

    def _relevant(self, color: int, graph: fx.GraphModule) -> list[fx.Node]:
        """The nodes of a graph through which operations between colors pass.

        Just the placeholders and the output if there is none, so that calling it can be skipped.
        """
        key = (id(graph), self._between[color])
        known = self._steps.get(key)
        if known is not None:
            return known
        found: dict[fx.Node, None] = {}
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                found[node] = None
            elif node.op == "call_module":
                if self._enters(color, subgraph(graph, node)):
                    found[node] = None
            elif node.op == "call_function" and self._matters(color, node, found):
                found[node] = None
        self._steps[key] = list(found)
        return self._steps[key]

    def _matters(self, color: int, node: fx.Node, found: dict[fx.Node, None]) -> bool:
        if collective_kind(node) is not None:
            return group_of(node) in self._between[color]
        if node.target in POINT_TO_POINT:
            return True
        return (node.target in WAITS or node.target is operator.getitem) and node.args[0] in found

    def _enters(self, color: int, graph: fx.GraphModule) -> bool:
        ends = ("placeholder", "output")
        return any(
            node.op not in ends and node.target is not operator.getitem
            for node in self._relevant(color, graph)
        )

    def _start(self, color: int, node: fx.Node, path: str) -> Operation:
        module_path = node.meta.get("module_path")
        site = f"{path}%{node.name}" + (f" ({module_path})" if module_path else "")
        collective = collective_kind(node)
        if collective is not None:
            kind, name, signature, text = _collective(node, collective)
            members = self._colors.groups[color][name]
        else:
            kind, name, stage, signature, text = _message(node)
            peer = self._colors.peer(color, stage)
            members = (min(color, peer), max(color, peer))
            text += f" rank {self._colors.rank(peer)} on channel '{name}'"
        communicator = (f"{'group' if collective else 'channel'} '{name}'", members)
        number = self._numbers[communicator, color]
        self._numbers[communicator, color] += 1
        operation = Operation(color, kind, signature, communicator, number, text, site)
        self._queues[communicator, color].append(operation)
        self._progress(communicator)
        return operation

    def _progress(self, communicator: tuple[str, tuple[int, ...]]) -> None:
        """Complete what stands first on all sides of a communicator, as often as it does."""
        queues = [self._queues[communicator, color] for color in communicator[1]]
        while all(queues):
            heads = [queue[0] for queue in queues]
            kinds = {head.kind for head in heads}
            if len(kinds) == 1 and kinds <= {"send", "recv"}:
                return  # both send or both receive: neither can complete before the other
            if kinds != {"send", "recv"} and len(kinds) > 1:
                raise self._mismatch(heads)
            if len({head.signature for head in heads}) > 1:
                raise self._mismatch(heads)
            for queue in queues:
                queue.popleft().done = True

    def _mismatch(self, heads: Sequence[Operation]) -> CommunicationError:
        first = heads[0]
        other = next(h for h in heads if (h.kind, h.signature) != (first.kind, first.signature))
        if {first.kind, other.kind} == {"send", "recv"}:
            other = heads[1]
        return CommunicationError(
            f"ranks disagree on operation {first.number} of {first.communicator[0]}:\n"
            f"  {self._who(first.color)}: {first}\n"
            f"  {self._who(other.color)}: {other}"
        )

    def _who(self, color: int) -> str:
        return self._colors.describe(color)

    def _report(self) -> str:
        if not self._waiting:
            lines = ["all ranks end, but:"]
            for queue in self._queues.values():
                lines += [f"{self._who(o.color)}: {o}: {self._why(o)}" for o in queue]
            return "\n  ".join(lines)
        lines = ["deadlock: no rank can go on."]
        for color in range(len(self._programs)):
            operation = self._waiting.get(color)
            if operation is None:
                lines.append(f"{self._who(color)} has ended")
            else:
                lines.append(f"{self._who(color)} waits in {operation}: {self._why(operation)}")
        return "\n  ".join(lines)

    def _why(self, operation: Operation) -> str:
        """What an operation that cannot complete lacks."""
        head = self._queues[operation.communicator, operation.color][0]
        if head is not operation:
            return f"before it on {operation.communicator[0]} comes {head}"
        lacks: list[str] = []
        for color in operation.communicator[1]:
            queue = self._queues[operation.communicator, color]
            if color != operation.color and not queue:
                lacks.append(f"{self._who(color)} has not started operation {operation.number}")
            elif color != operation.color and queue[0].kind == operation.kind in ("send", "recv"):
                lacks.append(f"{self._who(color)} is at {queue[0]}")
        return f"on {operation.communicator[0]}, {' and '.join(lacks)}"


def _tokens(value: Any, values: dict[fx.Node, Any]) -> Any:
    """`value` with operations in place of nodes, and None for all else."""
    if isinstance(value, fx.Node):
        return values.get(value)
    if isinstance(value, (tuple, list)):
        return tuple(_tokens(item, values) for item in value)
    return None


def _collective(node: fx.Node, kind: str) -> tuple[str, str, Hashable, str]:
    value = _value(node, node.args[0])
    rest: tuple[Any, ...] = tuple(node.args[1:-1])
    if node.target in FUSED:  # what each rank multiplies with is its own affair
        value, rest = moved_tensors(node)[0], (node.args[-2],)
    described = ", ".join([describe(value), *map(str, rest)])
    text = f"{kind}({described}) on '{group_of(node)}'"
    if kind == "all_to_all":
        return kind, group_of(node), (tuple(value.shape[1:]), value.dtype), text
    return kind, group_of(node), (tuple(value.shape), value.dtype, rest), text


def _message(node: fx.Node) -> tuple[str, str, int, Hashable, str]:
    arguments: Any = node.args
    if node.target is actions.recv:
        stage, channel, shapes, dtypes = arguments
        expected = tuple((tuple(s), d) for s, d in zip(shapes, dtypes, strict=True))
        described = ", ".join(f"{DTYPE_NAMES[d]}[{','.join(map(str, s))}]" for s, d in expected)
        return "recv", channel, stage, expected, f"recv ({described}) from"
    operands, stage, channel = arguments
    values = tuple(_value(node, operand) for operand in operands)
    types = tuple((tuple(value.shape), value.dtype) for value in values)
    return "send", channel, stage, types, f"send {describe(values)} to"


def _value(node: fx.Node, operand: Any) -> torch.Tensor:
    if not isinstance(operand, fx.Node) or operand.meta.get("val") is None:
        raise VerifyError(f"%{node.name} sends %{operand}, whose shape is unknown (meta['val']).")
    return tensor_of(operand)
