"""Process groups by symbolic name.

    "tp"          the ranks that differ only on tp
    "dp,tp"       the ranks that differ only on dp and tp
    "pp[0,3]"     the ranks at coordinates 0 and 3 of pp that differ only there (a tied weight)
    "dp/4"        the ranks that differ only on dp, of each 4 neighbours there
    "dp%4"        the ranks that differ only on dp, by multiples of 4

A name means the same set of ranks to each of its members. The order is that of the ranks, which for
one axis is that of its coordinates, and which is the only order that `torch.distributed` knows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from msc.ir.errors import PlanError
from msc.ir.mesh import KNOWN_AXES, Mesh

_PART = re.compile(
    r"\s*([a-z]+)\s*(?:\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]|([/%])\s*(\d+))?\s*(?:,|$)", re.ASCII
)


@dataclass(frozen=True)
class Part:
    """What a group spans of one axis: all of it unless one of the others is given.

    chosen: these coordinates; neighbours: runs of so many; stride: those that differ by multiples.
    """

    axis: str
    chosen: tuple[int, ...] | None = None
    neighbours: int | None = None
    stride: int | None = None

    def contains(self, coordinate: int) -> bool:
        """Whether a rank at this coordinate is in a group."""
        return self.chosen is None or coordinate in self.chosen

    def members(self, size: int, coordinate: int) -> tuple[int, ...]:
        """The coordinates, on an axis of `size`, of the group of a rank at `coordinate`."""
        if self.chosen is not None:
            return self.chosen
        if self.neighbours is not None:
            first = coordinate - coordinate % self.neighbours
            return tuple(range(first, min(first + self.neighbours, size)))
        return tuple(range(coordinate % (self.stride or 1), size, self.stride or 1))

    def count(self, size: int) -> int:
        """How many coordinates of an axis of `size` are in a group."""
        return len(self.members(size, 0 if self.chosen is None else self.chosen[0]))

    def firsts(self, size: int) -> range | tuple[int, ...]:
        """The first coordinate of each group on an axis of `size`."""
        if self.chosen is not None:
            return self.chosen[:1]
        if self.neighbours is not None:
            return range(0, size, self.neighbours)
        return range(self.stride or 1)


@dataclass(frozen=True)
class Group:
    """Axes that a group spans, each with the coordinates that take part."""

    name: str
    parts: tuple[Part, ...]

    @classmethod
    def parse(cls, name: str) -> Group:
        """Return the group that `name` describes; raise `PlanError` if it describes none."""
        return _parse(name)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that it spans."""
        return tuple(part.axis for part in self.parts)

    def contains(self, mesh: Mesh, rank: int) -> bool:
        """Whether `rank` takes part in a group of this name."""
        here = mesh.coordinate(rank)
        return all(part.contains(here.get(part.axis, 0)) for part in self.parts)

    def members(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The members of the group that `rank` is in, by ascending rank.

        Raises `PlanError` if `rank` is in no such group or a coordinate is outside the mesh.
        """
        return _members(self, mesh, rank)

    def size(self, mesh: Mesh) -> int:
        """How many members a group has."""
        return math.prod(part.count(mesh.axis_size(part.axis)) for part in self.parts)

    def key(self, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """What the members of a group have in common, as numbers: one key for each group."""
        spans = {part.axis: part for part in self.parts}
        found = []
        for axis, index in coordinate.items():
            part = spans.get(axis)
            size = mesh.axis_size(axis)
            found.append(index if part is None else part.members(size, index)[0])
        return tuple(found)

    def __str__(self) -> str:
        return self.name


@cache
def _parse(name: str) -> Group:
    parts: list[Part] = []
    position = 0
    valid = True
    while position < len(name):
        match = _PART.match(name, position)
        if match is None or match.end() == position:
            break
        axis, chosen, sign, number = match.groups()
        if chosen is not None:
            numbers = tuple(sorted({int(n) for n in chosen.split(",")}))
            parts.append(Part(axis, chosen=numbers))
        elif sign is not None:
            valid = valid and int(number) > 0
            count = int(number)
            is_run = sign == "/"
            parts.append(Part(axis, neighbours=count) if is_run else Part(axis, stride=count))
        else:
            parts.append(Part(axis))
        position = match.end()
    axes = [part.axis for part in parts]
    complete = valid and position == len(name) and not name.rstrip().endswith(",")
    known = all(axis in KNOWN_AXES for axis in axes)
    if not parts or not complete or not known or len(set(axes)) != len(axes):
        raise PlanError(
            f"'{name}' names no group of ranks. Write mesh axes ({', '.join(KNOWN_AXES)}), each "
            "once, with the coordinates that take part if not all do: 'tp', 'dp,tp', 'pp[0,3]', "
            "'dp/4' for runs of 4 neighbours, or 'dp%4' for those 4 apart."
        )
    return Group(name, tuple(parts))


@lru_cache(maxsize=65536)
def _members(group: Group, mesh: Mesh, rank: int) -> tuple[int, ...]:
    here = mesh.coordinate(rank)
    choices: list[tuple[int, ...]] = []
    for part in group.parts:
        size = mesh.axis_size(part.axis)
        if part.chosen is not None and part.chosen[-1] >= size:
            raise PlanError(
                f"Group '{group}' names coordinate {part.chosen[-1]} of axis '{part.axis}', which "
                f"has {size} ranks (mesh {mesh})."
            )
        coordinate = here.get(part.axis, 0)
        if not part.contains(coordinate):
            raise PlanError(
                f"Rank {rank} is at {part.axis}={coordinate} and so in no group '{group}' "
                f"(mesh {mesh}). Only its members may use a group."
            )
        choices.append(part.members(size, coordinate))
    found = [
        mesh.rank({**here, **dict(zip(group.axes, at, strict=True))})
        for at in itertools.product(*choices)
    ]
    return tuple(sorted(found))
