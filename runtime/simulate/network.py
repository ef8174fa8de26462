"""Communicators of the simulated ranks: each carries out its operations one after the other.

A communicator is a group or one direction of a pair of pipeline stages, as on a real cluster, where
each has a stream of its own on every rank. An operation begins when all its members have started it
and the one before it is over; it keeps all of them busy for the seconds that the cost model says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from msc.cost import Cluster
from msc.cost.collectives import collective_seconds, send_seconds
from msc.cost.topology import Span, crosses_nodes, group_spans
from msc.ir.communication import MOVES
from msc.ir.errors import CommunicationError
from msc.ir.groups import Group
from msc.ir.mesh import Mesh
from msc.runtime.simulate.templates import Start


@dataclass(eq=False)
class Communication:
    """One operation of a communicator, its `number`-th; `module` and `node` say where it starts.

    ready: when each class of ranks started it. exposed: seconds that each class's compute stream
    waited while it was under way. begin, end: once all members have started it.
    """

    communicator: Communicator
    number: int
    kind: str
    payload_bytes: int
    module: str
    node: str
    ready: dict[int, float] = field(default_factory=dict)
    begin: float = 0.0
    end: float = 0.0
    done: bool = False
    exposed: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long it is under way."""
        return self.end - self.begin

    def missing(self) -> list[int]:
        """The classes of ranks that have not started it."""
        return [own for own in self.communicator.classes if own not in self.ready]


class Communicator:
    """A group or a channel: the classes of its ranks, and its operations in order."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        classes: tuple[int, ...],
        stages: frozenset[int],
        link: frozenset[Span] | bool,
    ) -> None:
        self.name = name
        self.classes = classes
        self.between_stages = len(stages) > 1
        self.operations: list[Communication] = []
        self._cluster = cluster
        self._link = link
        self._free = 0.0
        self._started: Counter[int] = Counter()

    def join(self, own: int, start: Start, clock: float) -> Communication:
        """A class of ranks starts its next operation; `CommunicationError` if it is another one."""
        number = self._started[own]
        self._started[own] += 1
        kind = "message" if start.stage is not None else start.kind
        if number == len(self.operations):
            self.operations.append(
                Communication(
                    self, number, kind, start.payload_bytes, start.module, start.node.name
                )
            )
        found = self.operations[number]
        if (found.kind, found.payload_bytes) != (kind, start.payload_bytes):
            raise CommunicationError(
                f"ranks disagree on operation {number} of '{self.name}': {found.kind} of "
                f"{found.payload_bytes} bytes at %{found.node}, {kind} of {start.payload_bytes} "
                f"bytes at %{start.node.name}."
            )
        found.ready[own] = clock
        if len(found.ready) == len(self.classes):
            found.begin = max(self._free, *found.ready.values())
            self._free = found.end = found.begin + self._seconds(kind, start.payload_bytes)
            found.done = True
        return found

    def _seconds(self, kind: str, payload_bytes: int) -> float:
        if isinstance(self._link, bool):
            return send_seconds(self._cluster, payload_bytes, self._link)
        kind = MOVES.get(kind, kind)
        return max(
            collective_seconds(self._cluster, kind, payload_bytes, span) for span in self._link
        )


class Network:
    """Finds the communicator of what a class of ranks starts.

    ranks: one rank of each class; class_of: the class of a rank, which depends on its coordinates
    on `axes` only.
    """

    def __init__(
        self,
        mesh: Mesh,
        cluster: Cluster,
        ranks: Sequence[int],
        class_of: Callable[[int], int],
        axes: Collection[str],
    ) -> None:
        self._mesh = mesh
        self.cluster = cluster
        self._ranks = ranks
        self._class_of = class_of
        # which classes meet in a group does not depend on the sizes of the other axes
        self._few = Mesh(tuple((axis, size if axis in axes else 1) for axis, size in mesh))
        self._known: dict[tuple[str, tuple[int, ...]], Communicator] = {}
        self._own: dict[tuple[int, str], Communicator] = {}

    def communicator(self, own: int, start: Start) -> Communicator:
        """The communicator on which class `own` starts an operation."""
        found = self._own.get((own, start.name))
        if found is None:
            make = self._group if start.stage is None else self._channel
            found = self._own[own, start.name] = make(own, start)
        return found

    def _group(self, own: int, start: Start) -> Communicator:
        group = Group.parse(start.name)
        here = {a: at for a, at in self._coordinate(own).items() if self._few.axis_size(a) > 1}
        members = group.members(self._few, self._few.rank(here))
        coordinates = [self._few.coordinate(rank) for rank in members]
        stages = frozenset(at.get("pp", 0) for at in coordinates)
        classes = tuple(sorted({self._class_of(self._mesh.rank(at)) for at in coordinates}))
        spans = group_spans(self._mesh, group, stages, self.cluster.devices_per_node)
        return self._shared(start.name, classes, stages, spans)

    def _channel(self, own: int, start: Start) -> Communicator:
        here = self._coordinate(own)
        stage, peer = here.get("pp", 0), start.stage
        assert peer is not None
        if peer == stage or not 0 <= peer < self._mesh.axis_size("pp"):
            raise CommunicationError(
                f"%{start.node.name} of stage {stage} sends to or receives from stage {peer}; the "
                f"mesh {self._mesh} has stages 0 to {self._mesh.axis_size('pp') - 1}."
            )
        other = self._class_of(self._mesh.rank({**here, "pp": peer}))
        across = crosses_nodes(self._mesh, stage, peer, self.cluster.devices_per_node)
        classes = tuple(sorted((own, other)))
        return self._shared(start.name, classes, frozenset((stage, peer)), across)

    def _coordinate(self, own: int) -> dict[str, int]:
        return self._mesh.coordinate(self._ranks[own])

    def _shared(
        self,
        name: str,
        classes: tuple[int, ...],
        stages: frozenset[int],
        link: frozenset[Span] | bool,
    ) -> Communicator:
        key = (name, classes)
        if key not in self._known:
            self._known[key] = Communicator(self.cluster, name, classes, stages, link)
        return self._known[key]

    @property
    def communicators(self) -> list[Communicator]:
        """All that were used, in the order of their first use."""
        return list(self._known.values())
