"""Process groups by symbolic name.

    "tp"          the ranks that differ only on tp
    "dp,tp"       the ranks that differ only on dp and tp
    "pp[0,3]"     the ranks at coordinates 0 and 3 of pp that differ only there (a tied weight)

A name means the same set of ranks to each of its members. The order is that of the ranks, which for
one axis is that of its coordinates, and which is the only order that `torch.distributed` knows.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache, lru_cache

from msc.ir.errors import PlanError
from msc.ir.mesh import KNOWN_AXES, Mesh

_PART = re.compile(r"\s*([a-z]+)\s*(?:\[\s*(\d+(?:\s*,\s*\d+)*)\s*\])?\s*(?:,|$)")


@dataclass(frozen=True)
class Group:
    """Axes that a group spans, each with the coordinates that take part (None: all of them)."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...] | None], ...]

    @classmethod
    def parse(cls, name: str) -> Group:
        """Return the group that `name` describes; raise `PlanError` if it describes none."""
        return _parse(name)

    def contains(self, mesh: Mesh, rank: int) -> bool:
        """Whether `rank` takes part in a group of this name."""
        here = mesh.coordinate(rank)
        return all(chosen is None or here.get(axis, 0) in chosen for axis, chosen in self.parts)

    def members(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The members of the group that `rank` is in, by ascending rank.

        Raises `PlanError` if `rank` is in no such group or a coordinate is outside the mesh.
        """
        return _members(self, mesh, rank)

    def __str__(self) -> str:
        return self.name


@cache
def _parse(name: str) -> Group:
    parts: list[tuple[str, tuple[int, ...] | None]] = []
    position = 0
    while position < len(name):
        match = _PART.match(name, position)
        if match is None or match.end() == position:
            break
        axis, chosen = match.groups()
        numbers = None if chosen is None else tuple(sorted({int(n) for n in chosen.split(",")}))
        parts.append((axis, numbers))
        position = match.end()
    axes = [axis for axis, _ in parts]
    complete = position == len(name) and not name.rstrip().endswith(",")
    known = all(axis in KNOWN_AXES for axis in axes)
    if not parts or not complete or not known or len(set(axes)) != len(axes):
        raise PlanError(
            f"'{name}' names no group of ranks. Write mesh axes ({', '.join(KNOWN_AXES)}), each "
            "once, with the coordinates that take part if not all do: 'tp', 'dp,tp' or 'pp[0,3]'."
        )
    return Group(name, tuple(parts))


@lru_cache(maxsize=65536)
def _members(group: Group, mesh: Mesh, rank: int) -> tuple[int, ...]:
    here = mesh.coordinate(rank)
    choices: list[tuple[int, ...]] = []
    for axis, chosen in group.parts:
        size = mesh.axis_size(axis)
        numbers = tuple(range(size)) if chosen is None else chosen
        if numbers[-1] >= size:
            raise PlanError(
                f"Group '{group}' names coordinate {numbers[-1]} of axis '{axis}', which has "
                f"{size} ranks (mesh {mesh})."
            )
        if here.get(axis, 0) not in numbers:
            raise PlanError(
                f"Rank {rank} is at {axis}={here.get(axis, 0)} and so in no group '{group}' "
                f"(mesh {mesh}). Only its members may use a group."
            )
        choices.append(numbers)
    axes = [axis for axis, _ in group.parts]
    found = [
        mesh.rank({**here, **dict(zip(axes, at, strict=True))})
        for at in itertools.product(*choices)
    ]
    return tuple(sorted(found))
