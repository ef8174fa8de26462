"""Color ranks so that equal color means equal program and peers of equal colors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from msc.ir.communication import (
    collective_kind,
    graphs_below,
    group_of,
    used_channels,
    used_groups,
)
from msc.ir.errors import PlanError
from msc.ir.groups import Group
from msc.ir.mesh import Mesh

_SIZE_ARGUMENT = {
    "all_gather": 1,
    "reduce_scatter": 2,
    "all_gather_matmul": -2,
    "matmul_reduce_scatter": -2,
}


@dataclass(frozen=True)
class Colors:
    """A color per rank, and of each color its lowest rank and the number of its ranks."""

    whole: Mesh
    mesh: Mesh
    """The mesh whose ranks are colored: `whole`, or a quotient of it."""
    of: tuple[int, ...]
    representatives: tuple[int, ...]
    counts: tuple[int, ...]
    groups: tuple[Mapping[str, tuple[int, ...]], ...]
    """Of each color, for each group that it uses: the colors of the group's members."""

    def peer(self, color: int, stage: int) -> int:
        """The color of the ranks at pp coordinate `stage` that `color`'s ranks send to."""
        here = self.mesh.coordinate(self.representatives[color])
        return self.of[self.mesh.rank({**here, "pp": stage})]

    def rank(self, color: int) -> int:
        """The lowest rank of `color` in the whole mesh."""
        return self.whole.rank(self.mesh.coordinate(self.representatives[color]))

    def describe(self, color: int) -> str:
        """`rank 8 (pp=1,dp=0; 7 more alike)`: the ranks of `color` in the whole mesh."""
        at = self.mesh.coordinate(self.representatives[color])
        more = self.counts[color] * (self.whole.size // self.mesh.size) - 1
        text = ",".join(f"{axis}={index}" for axis, index in at.items())
        return f"rank {self.rank(color)} ({text}{f'; {more} more alike' if more else ''})"


class _Uses:
    """What one program names: groups and pp coordinates of peers."""

    def __init__(self, mesh: Mesh, program: fx.GraphModule) -> None:
        self.groups = [Group.parse(name) for name in used_groups(program)]
        self.stages = sorted({stage for _, stage in used_channels(program)})
        for stage in self.stages:
            if not 0 <= stage < mesh.axis_size("pp"):
                raise PlanError(
                    f"A program sends to or receives from stage {stage}; axis 'pp' of mesh {mesh} "
                    f"has {mesh.axis_size('pp')} ranks."
                )
        _check_sizes(mesh, program)

    def check(self, mesh: Mesh, rank: int) -> None:
        """Raise `PlanError` if `rank` is in one of the groups not a member, or its own peer."""
        for group in self.groups:
            if not group.contains(mesh, rank):
                group.members(mesh, rank)  # says why
        stage = mesh.coordinate(rank).get("pp", 0)
        if stage in self.stages:
            raise PlanError(f"Rank {rank} (pp={stage}) sends to itself or receives from itself.")


def color_ranks(
    mesh: Mesh,
    classes: Sequence[Hashable],
    programs: Mapping[Any, fx.GraphModule],
    whole: Mesh | None = None,
) -> Colors:
    """The coarsest coloring that refines `classes`, which has one entry per rank of `mesh`.

    whole: the mesh that the programs are for, if `mesh` is a `quotient` of it.
    Raises `PlanError` if a program uses a group or a peer that its rank does not have.
    """
    whole = whole or mesh
    by_class = {own: _Uses(whole, program) for own, program in programs.items()}
    uses = [by_class[own] for own in classes]
    for rank, used in enumerate(uses):
        used.check(whole, whole.rank(mesh.coordinate(rank)))
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    colors = _numbered(classes)
    while True:
        spans = _spans(mesh, uses, coordinates, colors)
        signatures = [
            (
                colors[rank],
                tuple(spans[rank].items()),
                tuple(colors[mesh.rank({**at, "pp": stage})] for stage in uses[rank].stages),
            )
            for rank, at in enumerate(coordinates)
        ]
        refined = _numbered(signatures)
        if max(refined) == max(colors):
            break
        colors = refined
    first = {color: rank for rank, color in reversed(list(enumerate(colors)))}
    representatives = tuple(first[color] for color in range(max(colors) + 1))
    return Colors(
        whole,
        mesh,
        tuple(colors),
        representatives,
        tuple(colors.count(color) for color in range(len(representatives))),
        tuple(spans[rank] for rank in representatives),
    )


def quotient(mesh: Mesh, axes: Collection[str], programs: Iterable[fx.GraphModule]) -> Mesh:
    """The mesh with the axes at size 1 on which no color can depend.

    If classes depend on the coordinates of `axes` only, and no group chooses coordinates of another
    axis, then each coordinate of that axis can be brought to each other one so that groups stay
    groups: ranks that differ there only have one color, and those at coordinate 0 stand for all.
    """
    chosen = {
        part.axis
        for program in programs
        for name in used_groups(program)
        for part in Group.parse(name).parts
        if part.chosen is not None
    }
    kept = {"pp", *axes, *chosen}  # peers are named by their coordinate on pp
    return Mesh(tuple((axis, size if axis in kept else 1) for axis, size in mesh))


def _numbered(values: Sequence[Hashable]) -> list[int]:
    """Equal values by equal numbers, counted by first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _spans(
    mesh: Mesh,
    uses: Sequence[_Uses],
    coordinates: Sequence[Mapping[str, int]],
    colors: Sequence[int],
) -> list[dict[str, tuple[int, ...]]]:
    """Of each rank, for each group that it uses, the colors of the members.

    Members are found by the coordinates that they share, never listed one by one for each rank.
    """
    found: dict[tuple[str, Hashable], set[int]] = defaultdict(set)
    names: dict[str, Group] = {group.name: group for used in uses for group in used.groups}
    keys: list[dict[str, Hashable]] = []
    for rank, at in enumerate(coordinates):
        own: dict[str, Hashable] = {}
        for name, group in names.items():
            if all(part.contains(at.get(part.axis, 0)) for part in group.parts):
                own[name] = group.key(mesh, at)
                found[name, own[name]].add(colors[rank])
        keys.append(own)
    return [
        {group.name: tuple(sorted(found[group.name, own[group.name]])) for group in used.groups}
        for used, own in zip(uses, keys, strict=True)
    ]


def _check_sizes(mesh: Mesh, program: fx.GraphModule) -> None:
    """Raise `PlanError` if a collective's number of members is not that of its group."""
    for module in graphs_below(program):
        for node in module.graph.nodes:
            position = _SIZE_ARGUMENT.get(collective_kind(node) or "")
            if position is None:
                continue
            size = Group.parse(group_of(node)).size(mesh)
            if node.args[position] != size:
                raise PlanError(
                    f"%{node.name} counts {node.args[position]} members of group "
                    f"'{group_of(node)}', which has {size} on mesh {mesh}."
                )
