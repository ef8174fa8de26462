"""The nodes of a run: which have ranks, and which wait to take those of a lost one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msc.runtime.checkpoint.marks import Mark
from msc.runtime.recovery.arenas import newest_common
from msc.runtime.recovery.environment import Layout


class Send(Protocol):
    """Gives an agent a command; what it is to do comes as JSON."""

    def __call__(self, command: str, /, **facts: Any) -> None: ...


@dataclass(eq=False)
class Node:
    """A node as the controller knows it.

    address: where its agent gives snapshots, if there are other nodes; wish: the number that it
    wants to have, index: the one that it has; held: the snapshots that its agent has, by rank;
    reached: how many losses; rings: what was read last, None while that is not there.
    """

    send: Send
    name: str = ""
    address: tuple[str, int] = ("", 0)
    wish: int | None = None
    index: int | None = None
    held: dict[int, set[Mark]] = field(default_factory=dict)
    reached: int = 0
    rings: Sequence[Mapping[str, Any]] | None = None

    def holds(self, held: Iterable[tuple[int, Iterable[tuple[int, int]]]], reached: int) -> None:
        """Its agent has these snapshots, by rank generation and step, and so many losses."""
        self.held = {rank: {Mark(*found) for found in marks} for rank, marks in held}
        self.reached = reached

    def __str__(self) -> str:
        number = "a waiting node" if self.index is None else f"node {self.index}"
        return f"{number} ({self.name})" if self.name else number


class Roster:
    """Has the nodes of `layout`, and up to `spares` more.

    layout: where the ranks are now; seated: by index; waiting: the others, and before the run
    begins all.
    """

    def __init__(self, layout: Layout, spares: int) -> None:
        self.seated: dict[int, Node] = {}
        self.waiting: list[Node] = []
        self.layout = layout
        self._spares = spares

    def __iter__(self) -> Iterator[Node]:
        return iter([*self.seated.values(), *self.waiting])

    def of(self, rank: int) -> Node | None:
        """The node of a rank; None while there is none."""
        return self.seated.get(self.layout.node_of(rank))

    def refusal(self, node: Node) -> str:
        """Why a node cannot be one of the run; "" if it can."""
        if node.wish is not None and any(other.wish == node.wish for other in self):
            return f"there is a node with rank {node.wish} already"
        size = len(self.seated) + len(self.waiting)
        if size >= self.layout.nnodes + self._spares:
            return (
                f"the run has all of its {self.layout.nnodes} nodes and {self._spares} spares "
                "(--spares says how many may wait)"
            )
        return ""

    def remove(self, node: Node) -> None:
        """A node is gone."""
        if node in self.waiting:
            self.waiting.remove(node)
        elif node.index is not None:
            del self.seated[node.index]

    def is_complete(self) -> bool:
        """Whether enough nodes wait to begin the run, those aside that wish to be spares."""
        return len([n for n in self.waiting if not self._is_spare(n)]) >= self.layout.nnodes

    def seat(self) -> list[int]:
        """Give places without a node to nodes that wait; which.

        First those that wish it, then those without a wish, then any.
        """
        filled = []
        vacant = [index for index in range(self.layout.nnodes) if index not in self.seated]
        for wishes in (True, False):
            for index in list(vacant):
                found = [n for n in self.waiting if (n.wish == index) == wishes]
                if found:
                    node = min(found, key=lambda each: each.wish is not None)
                    self.waiting.remove(node)
                    self.place(node, index)
                    vacant.remove(index)
                    filled.append(index)
        return filled

    def place(self, node: Node, index: int) -> None:
        """Give a place to a node."""
        node.index = index
        self.seated[index] = node

    def copies(self) -> list[tuple[Node, Node | None]]:
        """Each node, and the one of whose ranks it keeps copies: the one before it.

        A single node's are kept by a spare.
        """
        nnodes = self.layout.nnodes
        if nnodes > 1:
            before = {index: self.seated.get((index - 1) % nnodes) for index in self.seated}
            found = [(node, before[index]) for index, node in self.seated.items()]
            return found + [(node, None) for node in self.waiting]
        sources = [self.seated.get(0), *[None] * len(self.waiting)]
        return [(node, None) for node in self.seated.values()] + list(
            zip(self.waiting, sources, strict=False)
        )

    def newest_common(self, nodes: int = 1) -> Mark | None:
        """The newest snapshot that there is of every rank, on so many nodes each."""
        held: dict[int, Counter[Mark]] = {}
        for node in self:
            for rank, marks in node.held.items():
                held.setdefault(rank, Counter()).update(marks)
        enough = {rank: [m for m, n in marks.items() if n >= nodes] for rank, marks in held.items()}
        return newest_common(enough, self.layout.world)

    def holders(self, mark: Mark) -> list[Node]:
        """By rank a node that has this snapshot; its own one if that does."""
        found = []
        for rank in range(self.layout.world):
            own = self.of(rank)
            nodes = [n for n in self if mark in n.held.get(rank, ())]
            found.append(own if own in nodes and own is not None else nodes[0])
        return found

    def _is_spare(self, node: Node) -> bool:
        return node.wish is not None and node.wish >= self.layout.nnodes
