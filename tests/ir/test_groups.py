"""Symbolic group names."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.errors import PlanError
from msc.ir.groups import Group
from msc.ir.mesh import Mesh

MESH = Mesh.parse("pp=4,dp=2,tp=3")


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("tp", (3, 4, 5)),
        ("dp", (1, 4)),
        ("dp,tp", (0, 1, 2, 3, 4, 5)),
        ("tp, dp", (0, 1, 2, 3, 4, 5)),
        ("pp[0,3]", (4, 22)),
        ("pp[3, 0],dp", (1, 4, 19, 22)),
        ("pp/2", (4, 10)),
        ("pp%2", (4, 16)),
        ("pp%2,tp", (3, 4, 5, 15, 16, 17)),
    ],
)
def test_members(name: str, members: tuple[int, ...]) -> None:
    assert Group.parse(name).members(MESH, 4) == members


def test_an_axis_that_the_mesh_lacks_has_one_rank() -> None:
    assert Group.parse("dp").members(Mesh.parse("tp=2"), 1) == (1,)


@given(
    st.permutations(["pp", "dp", "tp"]),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), min_size=1, unique=True),
    st.data(),
)
def test_members_agree_on_the_group(
    axes: list[str], count: int, chosen: list[int], draw: st.DataObject
) -> None:
    """Every member sees the same tuple, and the groups of one name part the ranks that have one."""
    numbers = ",".join(map(str, chosen))
    pp = draw.draw(st.sampled_from([f"pp[{numbers}]", "pp/2", "pp%2", "pp/4", "pp%4"]))
    name = ",".join(pp if axis == "pp" else axis for axis in axes[:count])
    group = Group.parse(name)
    inside = [rank for rank in range(MESH.size) if group.contains(MESH, rank)]
    found = {group.members(MESH, rank) for rank in inside}
    for members in found:
        assert all(group.members(MESH, rank) == members for rank in members)
        assert list(members) == sorted(members)
        assert len(members) == group.size(MESH)
        assert len({group.key(MESH, MESH.coordinate(rank)) for rank in members}) == 1
    assert sorted(itertools.chain(*found)) == inside
    assert len({group.key(MESH, MESH.coordinate(rank)) for rank in inside}) == len(found)


@pytest.mark.parametrize(
    "name",
    ["", "tp,", ",tp", "x", "tp,tp", "pp[]", "pp[0", "tp]", "pp[-1]", "dp/", "dp/0", "dp%x", "/2"],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(PlanError) as error:
        Group.parse(name)
    assert str(error.value) == (
        f"'{name}' names no group of ranks. Write mesh axes (pp, dp, tp), each once, with the "
        "coordinates that take part if not all do: 'tp', 'dp,tp', 'pp[0,3]', 'dp/4' for runs of 4 "
        "neighbours, or 'dp%4' for those 4 apart."
    )


def test_ranks_outside_have_no_members() -> None:
    group = Group.parse("pp[0,3]")
    assert not group.contains(MESH, 6)
    with pytest.raises(PlanError, match=r"^Rank 6 is at pp=1 and so in no group 'pp\[0,3\]'"):
        group.members(MESH, 6)
    with pytest.raises(PlanError, match=r"^Group 'pp\[0,4\]' names coordinate 4 of axis 'pp'"):
        Group.parse("pp[0,4]").members(MESH, 0)
