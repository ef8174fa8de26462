"""Predicted memory of a rank: the storages that are alive as generated code runs its graphs.

The graphs are walked in order, down into the graphs that they call, and references to storages are
counted as generated code counts them (`msc.codegen.emit`): a name ends after its last reader, an
argument that nobody else holds ends inside the callee, a view holds what it views, a sum may lie
in its operand's memory (`msc.codegen.in_place`). What calls allocate comes from `calls`. A started
collective holds its operand and its result until it has been waited for.

A graph is walked once for each way in which its arguments are held, so the time grows with what is
different, not with layers or micro-batches.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.lifetime import last_uses, unpacked
from msc.cost.flops import nbytes
from msc.ir import actions
from msc.ir.communication import COLLECTIVES, WAITS, fused_nodes, subgraph
from msc.ir.structure import placeholders
from msc.ir.values import operand_nodes
from msc.runtime.fused_kernels.arena import layout_of
from msc.runtime.memory.calls import CallMemories, CallMemory, Fresh, Operand


class MemoryPredictor:
    """Predicts the memory of rank graphs; what graphs have in common is looked at once.

    choice: which calls run in Triton kernels; without it, none. What ranks share for kernels of
    fused collectives is there from the first step on.
    """

    def __init__(self, choice: KernelChoice | None = None) -> None:
        self._choice = choice
        self._calls = CallMemories(choice)

    def bytes(self, graph: fx.GraphModule) -> int:
        """The most bytes that are alive at once during a step of a rank graph.

        Parameters, moments, inputs, gradients, saved activations, values in transfer, and what is
        alive only inside a forward or a backward; of one call also what its kernel allocates
        through torch.
        """
        return max(self.timeline(graph))

    def timeline(self, graph: fx.GraphModule) -> list[int]:
        """The most bytes that are alive while each node of a rank graph runs, in order.

        An item of a call that is unpacked at once, and a placeholder, are as the node before.
        """
        given = placeholders(graph)
        sizes = tuple(nbytes(node.meta["val"]) for node in given)
        held = _Held(tuple(range(len(given))), (True,) * len(given), sizes)
        frame = _Walker(self._calls).frame(graph, held)
        frame.run()
        start = sum(sizes) + self._shared(graph)
        found: list[int] = []
        for node in graph.graph.nodes:
            most = frame.most.get(node)
            found.append((found[-1] if found else start) if most is None else start + most)
        return found

    def _shared(self, graph: fx.GraphModule) -> int:
        """The memory of the fused kernels of all groups of a graph."""
        if self._choice is None:
            return 0
        calls = [self._choice.fused(node) for node in fused_nodes(graph)]
        groups = {call.group for call in calls if call is not None}
        return sum(layout_of(self._choice.fused_over(group)).total for group in groups)


@dataclass(frozen=True)
class _Held:
    """How the arguments of a graph are held.

    arguments: for each the number of its storage, or those of a token, nested; outside: by storage,
    whether the caller holds it beyond the call; sizes: by storage, its bytes.
    """

    arguments: tuple[Any, ...]
    outside: tuple[bool, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Outcome:
    """What calling a graph does to memory.

    peak, change: bytes over those before: the most, and at the end. results: storages, nested as
    the graph returns them; numbers beyond those of the arguments are new, with `sizes`. freed: the
    storages of arguments that ended.
    """

    peak: int
    change: int
    results: Any
    sizes: dict[int, int]
    freed: frozenset[int]


class _Walker:
    def __init__(self, memories: CallMemories) -> None:
        self._memories = memories
        self._calls: dict[int, dict[fx.Node, CallMemory]] = {}
        self._outcomes: dict[tuple[int, _Held], _Outcome] = {}

    def call(self, gm: fx.GraphModule, held: _Held) -> _Outcome:
        """Walk a graph whose arguments are held so."""
        key = (id(gm), held)
        if key not in self._outcomes:
            self._outcomes[key] = self.frame(gm, held).run()
        return self._outcomes[key]

    def frame(self, gm: fx.GraphModule, held: _Held) -> _Frame:
        """A run of a graph whose arguments are held so."""
        if id(gm) not in self._calls:
            self._calls[id(gm)] = self._memories.of(gm)
        return _Frame(self, gm, held, self._calls[id(gm)])


class _Frame:
    """One run of a graph: which names hold which storages, and what is alive.

    Storages are numbers; those of the arguments come first. A name holds them nested as its value
    is; a token of communication in flight holds its result and what is on its way.
    """

    def __init__(
        self, walker: _Walker, gm: fx.GraphModule, held: _Held, calls: dict[fx.Node, CallMemory]
    ) -> None:
        self.walker = walker
        self.gm = gm
        self.held = held
        self.calls = calls
        self.items = unpacked(gm)
        self.ends = last_uses(gm, self.items)
        self.sizes = list(held.sizes)
        self.permanent = {number for number, outside in enumerate(held.outside) if outside}
        self.references: dict[int, int] = defaultdict(int)
        self.names: dict[fx.Node, Any] = {}
        self.freed: set[int] = set()
        self.live = 0
        self.now = 0  # the most since the statement began
        self.most: dict[fx.Node, int] = {}  # while each statement runs

    def run(self) -> _Outcome:
        given = placeholders(self.gm)
        for node, storage in zip(given, self.held.arguments, strict=True):
            self._bind(node, storage)
        self._end([node for node in given if node in self.ends.get(node, ())])
        folded = {item for items in self.items.values() for item in items if item}
        for node in self.gm.graph.nodes:
            if node.op not in ("placeholder", "output") and node not in folded:
                self._statement(node)
        output = self.gm.graph.output_node()
        self.most[output] = self.live
        results = fx.map_arg(output.args[0], self.names.__getitem__)
        count = len(self.held.sizes)
        sizes = {number: self.sizes[number] for number in _storages(results) if number >= count}
        freed = frozenset(number for number in self.freed if number < count)
        peak = max(self.most.values(), default=0)
        return _Outcome(max(peak, 0), self.live, results, sizes, freed)

    def _statement(self, node: fx.Node) -> None:
        self.now = self.live
        ends = self.ends.get(node, [])
        if node.op == "call_module":
            operands = set(node.all_input_nodes)
            value = self._call_graph(node, [end for end in ends if end in operands])
            ends = [end for end in ends if end not in operands]
        else:
            value = self._value(node)
        if node not in self.items:
            self._bind(node, value)
        else:
            for item, part in zip(self.items[node], value, strict=True):
                if item is not None:
                    self._bind(item, part)
            self._sweep(_storages(value))  # what no name has taken
        self._end(ends)
        self.most[node] = self.now

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            constant = self._new(0)
            self.permanent.add(constant)
            return constant
        first: Any = node.args[0] if node.args else None
        if node.target is operator.getitem:
            return self.names[first][node.args[1]]
        if node.target in COLLECTIVES:
            return (self._allocate(nbytes(node.meta["val"])), tuple(self._operands(node)))
        if node.target is actions.send:
            return (None, tuple(self._operands(node)))
        if node.target is actions.recv:
            _, _, shapes, dtypes = node.args
            pairs = zip(shapes, dtypes, strict=True)  # type: ignore[arg-type]
            return (tuple(self._allocate(math.prod(s) * d.itemsize) for s, d in pairs), ())
        if node.target in WAITS:
            return self.names[first][0]
        return self._compute(node)

    def _compute(self, node: fx.Node) -> Any:
        call = self.calls[node]
        self.now = max(self.now, self.live + call.peak)
        operands = self._operands(node)
        fresh: dict[int, int] = {}

        def storage(leaf: Any) -> int | None:
            if isinstance(leaf, Operand):
                return operands[leaf.number]
            if not isinstance(leaf, Fresh):
                return None
            if leaf.number not in fresh:
                fresh[leaf.number] = self._allocate(leaf.size)
            return fresh[leaf.number]

        return pytree.tree_map(storage, call.results)

    def _operands(self, node: fx.Node) -> list[int]:
        return [s for operand in operand_nodes(node) for s in _storages(self.names[operand])]

    def _call_graph(self, node: fx.Node, given: list[fx.Node]) -> Any:
        arguments = [self.names[argument] for argument in operand_nodes(node)]
        for name in given:
            for storage in _storages(self.names.pop(name)):
                self.references[storage] -= 1
        outer = list(dict.fromkeys(_storages(arguments)))
        inner = {storage: number for number, storage in enumerate(outer)}
        held = _Held(
            tuple(pytree.tree_map(_by(inner), arguments)),
            tuple(s in self.permanent or self.references[s] > 0 for s in outer),
            tuple(self.sizes[s] for s in outer),
        )
        outcome = self.walker.call(subgraph(self.gm, node), held)
        self.now = max(self.now, self.live + outcome.peak)
        self.live += outcome.change
        self.freed |= {outer[number] for number in outcome.freed}
        own = dict(enumerate(outer)) | {n: self._new(size) for n, size in outcome.sizes.items()}
        return pytree.tree_map(_by(own), outcome.results)

    # -- storages

    def _new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _allocate(self, size: int) -> int:
        self.live += size
        self.now = max(self.now, self.live)
        return self._new(size)

    def _bind(self, node: fx.Node, value: Any) -> None:
        self.names[node] = value
        for storage in _storages(value):
            self.references[storage] += 1

    def _end(self, nodes: list[fx.Node]) -> None:
        for node in nodes:
            storages = _storages(self.names.pop(node))
            for storage in storages:
                self.references[storage] -= 1
            self._sweep(storages)

    def _sweep(self, storages: list[int]) -> None:
        """Free those that nothing holds."""
        for storage in storages:
            kept = storage in self.permanent or self.references[storage] > 0
            if not kept and storage not in self.freed:
                self.freed.add(storage)
                self.live -= self.sizes[storage]


def _storages(value: Any) -> list[int]:
    return [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]


def _by(numbers: Mapping[int, int]) -> Callable[[int | None], int | None]:
    """The new number of a storage; what is none, as a send's result, stays none."""
    return lambda storage: None if storage is None else numbers[storage]
