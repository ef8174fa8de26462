"""Where groups lie on nodes: by hand, and against every group of a mesh one by one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msc.cost.topology import Span, crosses_nodes, group_spans
from msc.ir.groups import Group
from msc.ir.mesh import Mesh

SIZES = st.sampled_from([1, 2, 3, 4])


def spans(mesh: str, group: str, devices_per_node: int = 8) -> set[Span]:
    parsed = Mesh.parse(mesh)
    stages = range(parsed.axis_size("pp"))
    return set(group_spans(parsed, Group.parse(group), stages, devices_per_node))


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("tp", Span(8, 1, 8)),
        ("dp", Span(192, 192, 1)),
        ("dp,tp", Span(1536, 192, 8)),
        ("pp,dp", Span(1536, 1536, 1)),
        ("pp,dp,tp", Span(12288, 1536, 8)),
        ("pp[0,7]", Span(2, 2, 1)),
    ],
)
def test_megascale(group: str, expected: Span) -> None:
    assert spans("pp=8,dp=192,tp=8", group) == {expected}


def test_groups_of_a_name_need_not_lie_alike() -> None:
    assert spans("dp=8,tp=3", "tp") == {Span(3, 1, 3), Span(3, 2, 1)}
    assert spans("dp=2,tp=4", "tp") == {Span(4, 1, 4)}
    assert spans("dp=2,tp=4", "dp") == {Span(2, 1, 2)}


@given(SIZES, SIZES, SIZES, st.integers(1, 6), st.permutations(["pp", "dp", "tp"]), st.data())
def test_all_groups_are_counted(
    pp: int, dp: int, tp: int, devices: int, order: list[str], data: st.DataObject
) -> None:
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    mesh = Mesh(tuple((axis, sizes[axis]) for axis in order))
    axes = data.draw(st.lists(st.sampled_from(order), min_size=1, unique=True))
    stages = data.draw(st.sets(st.integers(0, pp - 1), min_size=1))
    kind = data.draw(st.sampled_from(["", "/2", "%2"]) if dp % 2 == 0 else st.just(""))
    group = Group.parse(",".join(a + kind if a == "dp" else a for a in axes))
    expected = set()
    for rank in range(mesh.size):
        if mesh.coordinate(rank)["pp"] in stages or "pp" in axes:
            nodes = Counter(member // devices for member in group.members(mesh, rank))
            expected.add(Span(nodes.total(), len(nodes), min(nodes.values())))
    assert group_spans(mesh, group, stages, devices) == expected


@given(st.integers(2, 4), SIZES, SIZES, st.integers(1, 6), st.permutations(["pp", "dp", "tp"]))
def test_a_peer_is_on_another_node(
    pp: int, dp: int, tp: int, devices: int, order: list[str]
) -> None:
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    mesh = Mesh(tuple((axis, sizes[axis]) for axis in order))
    for stage, other in ((0, 1), (1, 0), (pp - 2, pp - 1)):
        pairs = [
            (rank, mesh.rank({**mesh.coordinate(rank), "pp": other}))
            for rank in range(mesh.size)
            if mesh.coordinate(rank)["pp"] == stage
        ]
        expected = any(a // devices != b // devices for a, b in pairs)
        assert crosses_nodes(mesh, stage, other, devices) == expected
