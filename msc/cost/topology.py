"""Where the members of a group lie: ranks fill the nodes in order, the last mesh axis fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msc.ir.groups import Group
from msc.ir.mesh import Mesh


@dataclass(frozen=True)
class Span:
    """A group of `size` ranks on `nodes` nodes, with at least `per_node` on each of them."""

    size: int
    nodes: int
    per_node: int


def group_spans(
    mesh: Mesh, group: Group, stages: Collection[int], devices_per_node: int
) -> frozenset[Span]:
    """How the groups of one name lie that have a member at one of these pp coordinates.

    They need not lie alike: of the groups of 3 neighbours on nodes of 8, some lie on two nodes. All
    groups of a name have the same offsets from their first member, so its position in its node
    decides, and the work does not grow with the number of groups.
    """
    here = {axis: 0 for axis, _ in mesh}
    here |= {part.axis: part.firsts(mesh.axis_size(part.axis))[0] for part in group.parts}
    first = mesh.rank(here)
    offsets = [rank - first for rank in group.members(mesh, first)]
    outside: dict[str, Collection[int]] = {
        axis: range(size) for axis, size in mesh if axis not in group.axes
    }
    if "pp" in outside:
        outside["pp"] = stages
    outside |= {
        part.axis: part.firsts(mesh.axis_size(part.axis))
        for part in group.parts
        if part.chosen is None
    }
    return frozenset(
        _span(base, offsets, devices_per_node)
        for base in _positions(mesh, outside, first, devices_per_node)
    )


def crosses_nodes(mesh: Mesh, stage: int, other: int, devices_per_node: int) -> bool:
    """Whether some rank at pp coordinate `stage` has its peer at `other` on another node."""
    first = mesh.rank({"pp": stage})
    offset = mesh.rank({"pp": other}) - first
    outside = {axis: range(size) for axis, size in mesh if axis != "pp"}
    return any(
        not 0 <= base + offset < devices_per_node
        for base in _positions(mesh, outside, first, devices_per_node)
    )


def _positions(
    mesh: Mesh, outside: Mapping[str, Collection[int]], first: int, devices_per_node: int
) -> set[int]:
    """Positions in their node of the ranks that differ from `first` on the axes `outside`."""
    found = {first % devices_per_node}
    for axis, coordinates in outside.items():
        stride = mesh.rank({axis: 1})
        found = {(at + index * stride) % devices_per_node for at in found for index in coordinates}
    return found


def _span(base: int, offsets: Collection[int], devices_per_node: int) -> Span:
    counts = Counter((base + offset) // devices_per_node for offset in offsets)
    return Span(len(offsets), len(counts), min(counts.values()))
