"""The parameters that a rank's chunks read: whole on the rank, or gathered over dp for a time.

zero 1, 2:  all gathers start with the step, in the order of use; a chunk waits for its own
            before its first forward, and keeps what it has gathered
zero 3:     each call waits for the gather of what its first block reads, which starts beside
            the call before it; the rest is gathered inside of the chunk
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from msc.cost.flops import nbytes
from msc.ir.structure import placeholders
from msc.passes.chunks import Chunk
from msc.passes.schedules.stages import Step
from msc.passes.zero.collectives import Act, Gathering, ShardGroup


class ParametersInUse:
    """Gives calls of chunks their parameters.

    held: of each parameter what the rank has, in the dtype of the chunks; sharding: None where
    nothing is split; per_call: parameters live only as long as a call (zero 3); limit: bytes that
    are gathered together, of so many bytes in all, where that is more than one block's.
    """

    def __init__(
        self,
        act: Act,
        chunks: Sequence[Chunk],
        held: Mapping[str, fx.Node],
        sharding: ShardGroup | None,
        per_call: bool,
        limit: Callable[[float], float],
    ) -> None:
        self.act = act
        self.chunks = {chunk.index: chunk for chunk in chunks}
        self.held = held
        self.sharding = sharding
        self.per_call = per_call
        self.limit = limit
        self.whole: dict[str, fx.Node] = {}
        self.waiting: list[tuple[int, list[str]]] = []
        self.flying: dict[Step | int, list[Gathering]] = {}
        self.values = {name: val for chunk in chunks for name, val in chunk.values.items()}

    def begin(self, steps: Sequence[Step]) -> None:
        """Start to gather what stays for all of a rank's steps: what is read first."""
        if self.sharding is None or self.per_call:
            return
        seen: set[str] = set()
        order = list(dict.fromkeys(step.chunk for step in steps))
        reads = {
            index: [_take(n, self.sharding, seen) for n in _by_call(self.chunks[index].forward)]
            for index in order
        }
        limit = self.limit(
            self._nbytes([n for lists in reads.values() for ns in lists for n in ns])
        )
        self.waiting = [
            (index, names) for index in order for names in self._joined(reads[index], limit)
        ]
        self._begin(self.waiting[:1])

    def begin_rest(self) -> None:
        """Start the rest, behind what else the first step needs of the network."""
        self._begin(self.waiting[1:])

    def _begin(self, together: Sequence[tuple[int, Sequence[str]]]) -> None:
        for index, names in together:
            self.flying.setdefault(index, []).extend(self._start(names))

    def announce(self, step: Step) -> None:
        """Start to gather what a step's call is given whole, some time before it."""
        if self.sharding is not None and self.per_call:
            names = self.chunks[step.chunk].whole[step.kind]
            self.flying[step] = self._start([n for n in names if n in self.sharding.shards])

    def of(self, step: Step) -> list[fx.Node]:
        """The parameters that a step's call is given, once they are there."""
        chunk = self.chunks[step.chunk]
        key = step if self.per_call else step.chunk
        for gathering in self.flying.pop(key, ()):
            wholes = [self.values[name] for name in gathering.names]
            self.whole |= gathering.finish(self.act, wholes)
        found = [self.whole.get(name, self.held[name]) for name in chunk.parameters]
        if self.per_call:
            self.whole.clear()
        return found

    def _joined(self, reads: Sequence[list[str]], limit: float) -> list[list[str]]:
        """What several calls read, in the lists of as many of them as `limit` allows."""
        found: list[list[str]] = []
        for names in reads:
            if found and self._nbytes([*found[-1], *names]) <= limit:
                found[-1] += names
            else:
                found.append(list(names))
        return found

    def _nbytes(self, names: Sequence[str]) -> float:
        return sum(nbytes(self.values[name]) for name in names)

    def _start(self, names: Sequence[str]) -> list[Gathering]:
        assert self.sharding is not None
        return self.sharding.start_gathers(self.act, {name: self.held[name] for name in names})


def _by_call(forward: fx.GraphModule) -> list[list[str]]:
    """The parameters of a chunk by the first call that reads them, in order."""
    first: dict[fx.Node, list[str]] = {}
    order = {node: index for index, node in enumerate(forward.graph.nodes)}
    for node in placeholders(forward):
        if node.meta["kind"] == "parameter" and node.users:
            reader = min(node.users, key=order.__getitem__)
            first.setdefault(reader, []).append(node.meta["name"])
    return [first[call] for call in sorted(first, key=order.__getitem__)]


def _take(names: Sequence[str], sharding: ShardGroup, seen: set[str]) -> list[str]:
    """Those of some parameters that are split and that no chunk before has gathered."""
    found = [name for name in names if name in sharding.shards and name not in seen]
    seen.update(found)
    return found
