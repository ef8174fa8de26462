"""Layouts: a parameter's parts make the whole again, whatever shards it, in the owners' order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.layout import InputLayout, ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.placement import Shard

MESHES = ["", "tp=2", "dp=2,tp=2", "tp=2,pp=2", "pp=2,dp=2,tp=3", "pp=3,tp=2"]
SHARDS = [
    {},
    {"tp": Shard(0)},
    {"tp": Shard(1)},
    {"tp": Shard(0, 2)},
    {"tp": Shard(0, (12, 6, 6))},
    {"dp": Shard(0), "tp": Shard(1)},
    {"dp": Shard(0), "tp": Shard(0)},
]


def layout(shards: dict[str, Shard], stages: tuple[int, ...] = (0,)) -> ParameterLayout:
    return ParameterLayout("w", (24, 12), torch.float32, True, (), shards, stages)


@given(st.sampled_from(MESHES), st.sampled_from(SHARDS), st.data())
def test_parts_make_the_whole(spec: str, shards: dict[str, Shard], data: st.DataObject) -> None:
    mesh = Mesh.parse(spec)
    shards = {axis: placement for axis, placement in shards.items() if axis in dict(mesh.axes)}
    stages = data.draw(st.sampled_from([(i,) for i in range(mesh.axis_size("pp"))]))
    found = layout(shards, stages)
    whole = torch.arange(24 * 12.0).view(24, 12)
    parts = {rank: found.local(whole, mesh, rank) for rank in range(mesh.size)}
    for rank, part in parts.items():
        assert tuple(part.shape) == found.local_shape(mesh, rank)
        assert part.is_contiguous()
    owners = found.owners(mesh)
    assert len(set(owners)) == len(owners)
    assert all(mesh.coordinate(rank).get("pp", 0) == stages[0] for rank in owners)
    assert torch.equal(found.whole([parts[rank] for rank in owners], mesh), whole)


def test_owners_are_the_first_copies() -> None:
    mesh = Mesh.parse("pp=2,dp=2,tp=2")
    assert layout({"tp": Shard(0)}).owners(mesh) == [0, 1]
    assert layout({"tp": Shard(0)}, (1,)).owners(mesh) == [4, 5]
    assert layout({}, (0, 1)).owners(mesh) == [0]
    assert layout({"dp": Shard(0), "tp": Shard(1)}).owners(mesh) == [0, 1, 2, 3]


def test_segments_are_split_each() -> None:
    found = ParameterLayout("w", (6,), torch.float32, True, (), {"tp": Shard(0, 3)})
    mesh = Mesh.parse("tp=2")
    assert found.local(torch.arange(6.0), mesh, 0).tolist() == [0, 2, 4]
    assert found.local(torch.arange(6.0), mesh, 1).tolist() == [1, 3, 5]


def test_a_part_is_memory_of_its_own() -> None:
    whole = torch.zeros(24, 12, requires_grad=True)
    for shards in ({}, {"tp": Shard(0)}):
        part = layout(shards).local(whole, Mesh.parse("tp=2"), 0)
        assert part.untyped_storage() is not whole.untyped_storage()
        assert not part.requires_grad


def test_inputs_are_split_over_dp() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    whole = torch.arange(8).view(4, 2)

    def local(dim: int | None, rank: int) -> list[list[int]]:
        found = InputLayout("x", (4, 2), torch.int64, dim).local(whole, mesh, rank, 1)
        rows: list[list[int]] = found.tolist()
        return rows

    assert local(0, 2) == [[4, 5], [6, 7]]
    assert local(1, 0) == [[0], [2], [4], [6]]
    assert local(None, 2) == whole.tolist()


def test_ranks_that_differ_on_tp_read_the_same_rows() -> None:
    whole = torch.arange(8).view(4, 2)
    mesh = Mesh.parse("dp=2,tp=2")
    found = InputLayout("x", (4, 2), torch.int64, 0)
    rows = [found.local(whole, mesh, rank, 1).tolist() for rank in range(4)]
    assert rows[0] == rows[1] == [[0, 1], [2, 3]]
    assert rows[2] == rows[3] == [[4, 5], [6, 7]]


def test_dp_splits_each_micro_batch() -> None:
    mesh = Mesh.parse("dp=2")
    found = InputLayout("x", (8,), torch.int64, 0)
    rows = [found.local(torch.arange(8), mesh, rank, 2).tolist() for rank in range(2)]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7]]
