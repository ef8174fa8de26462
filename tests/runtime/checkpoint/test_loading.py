"""Loading into any layout: each byte is read by one rank, checked there and where it arrives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msc.ir.data_shard import DataShard
from msc.ir.errors import UserError
from msc.ir.layout import ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.placement import Shard
from msc.runtime.checkpoint.catalog import read_commit, read_parts, verify
from msc.runtime.checkpoint.image import Image
from msc.runtime.checkpoint.reading import Bucket, ReadPlan
from msc.runtime.checkpoint.same_mesh import SameMesh
from msc.runtime.checkpoint.saved_state import SavedState
from msc.runtime.checkpoint.states import StateTensor, StateTensors, written_by
from msc.runtime.checkpoint.storage import LocalStorage
from msc.runtime.state import RankState
from tests.runtime.checkpoint import worlds
from tests.runtime.checkpoint.worlds import filled

SHAPES = {"rows": (24, 40), "fused": (48, 16), "columns": (16, 48), "norm": (16,), "tied": (7, 8)}
WHOLE = {
    name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * i
    for i, (name, shape) in enumerate(SHAPES.items())
}
LAYOUTS: dict[str, dict[str, Shard]] = {
    "": {},
    "tp=2": {
        "rows": Shard(0),
        "fused": Shard(0, 3),
        "columns": Shard(1, 2),
        "tied": Shard(0, 1, 1),
    },
    "pp=2,tp=2": {"rows": Shard(1), "fused": Shard(1), "columns": Shard(0)},
    "dp=2,tp=2": {"rows": Shard(0), "fused": Shard(0, (24, 16, 8)), "tied": Shard(1)},
    "dp=3": {},
    "tp=8": {"rows": Shard(0), "columns": Shard(1, 1, 3), "fused": Shard(0, 2)},
    "dp=5 in 5": {},
    "dp=4,tp=2 in 2": {"rows": Shard(0), "fused": Shard(0, 3), "tied": Shard(0, 1, 1)},
}
"""Parameters by mesh; "in n" splits what tp leaves over n neighbours on dp (ZeRO)."""
STAGES = {"rows": (0,), "fused": (1,), "columns": (0,), "norm": (1,), "tied": (0, 1)}


def states_of(spec: str) -> StateTensors:
    """Five parameters, one with a moment, and a buffer, laid out on a mesh."""
    text, _, parts = spec.partition(" in ")
    mesh = Mesh.parse(text)
    found = []
    for name, shape in SHAPES.items():
        shard = LAYOUTS[spec].get(name)
        shards = {} if shard is None else {"tp": shard}
        stages = STAGES[name] if mesh.axis_size("pp") > 1 else (0,)
        layout = ParameterLayout(name, shape, torch.float32, True, shards=shards, stages=stages)
        if parts:
            data = DataShard.choose(layout.local_shape(mesh, 0), int(parts))
            layout = replace(layout, data=data)
        found.append(StateTensor(f"model.{name}", "parameter", name, torch.float32, shape, layout))
        if name == "fused":
            held = f"first_moment.{name}"
            found.append(
                StateTensor(f"optimizer.{held}", "optimizer", held, torch.float32, shape, layout)
            )
    found.append(StateTensor("buffer.mean", "buffer", "mean", torch.float64, (3,), None))
    return StateTensors(mesh, tuple(found))


def ranks_of(states: StateTensors, filled: bool) -> list[RankState]:
    """The states of all ranks, with the values of `WHOLE` or zeros."""
    result = []
    for rank in range(states.mesh.size):
        stage = states.mesh.coordinate(rank).get("pp", 0)
        state = RankState({}, {"mean": torch.arange(3.0).double() if filled else torch.zeros(3)})
        for tensor in states.tensors:
            if tensor.layout is None or stage not in tensor.layout.stages:
                continue
            whole = WHOLE[tensor.layout.name] * (1 if filled else 0)
            if tensor.kind == "optimizer":
                whole = -whole
            tensor.put(state, tensor.layout.local(whole, states.mesh, rank))
        result.append(state)
    return result


@pytest.mark.parametrize(
    ("source", "target"), [pair for pair in itertools.permutations(LAYOUTS, 2)] + [("tp=2", "tp=2")]
)
def test_any_layout_to_any_layout(tmp_path: Path, source: str, target: str) -> None:
    storage = LocalStorage(tmp_path)
    before, after = states_of(source), states_of(target)
    folder = worlds.write(storage, before, ranks_of(before, True), 5)
    size = verify(storage, folder)
    ranks, expected = ranks_of(after, False), ranks_of(after, True)
    reports = worlds.load_states(storage, folder, after, ranks)
    assert [report.damage for report in reports] == [""] * len(ranks)
    assert sum(report.bytes_read for report in reports) == size  # each byte once
    for found, right in zip(ranks, expected, strict=True):
        for kind in ("parameters", "moments", "buffers"):
            values, wanted = getattr(found, kind), getattr(right, kind)
            assert values.keys() == wanted.keys()
            assert all(torch.equal(values[name], wanted[name]) for name in wanted), kind


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_takes_what_it_held_out_of_few_images(layout: str) -> None:
    states = states_of(layout)
    before, after = ranks_of(states, True), ranks_of(states, False)
    for rank, state in enumerate(after):
        target = {
            each.name: part for each in states.tensors if (part := each.of(state)) is not None
        }
        needed = SameMesh(states, rank, target)
        images = {}
        for writer, size in needed.sizes.items():
            whole = Image(written_by(states.tensors, states.mesh, writer))
            assert whole.size == size
            memory, images[writer] = filled(whole, before[writer]), torch.zeros(size).byte()
            for start, end in needed.ranges(writer):
                images[writer][start:end] = memory[start:end]
        needed.fill(target, images)
        for tensor in states.tensors:
            part = tensor.of(before[rank])
            assert (part is None) == (tensor.name not in target)
            assert part is None or torch.equal(target[tensor.name], part), tensor.name


def test_a_rank_of_many_needs_its_neighbours_on_dp_alone() -> None:
    states = states_of("pp=2,tp=2")
    mesh = Mesh.parse("pp=2,dp=64,tp=2")
    many = StateTensors(mesh, states.tensors)
    held = {"model.columns", "model.rows"}  # of stage 0, split on tp
    found = SameMesh(many, 5, held).sizes
    assert len(found) <= 3
    assert all(mesh.coordinate(rank)["tp"] == 1 for rank in found)


def test_each_part_is_written_once_and_dp_ranks_share_the_work() -> None:
    states = states_of("dp=3")
    work = [written_by(states.tensors, states.mesh, rank) for rank in range(3)]
    names = [tensor.name for part in work for tensor, _ in part]
    assert sorted(names) == sorted(tensor.name for tensor in states.tensors)
    sizes = [sum(tensor.nbytes for tensor, _ in part) for part in work]
    assert max(sizes) < 0.5 * sum(sizes)


def test_one_tensor_is_read_alone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    states = states_of("pp=2,tp=2")
    state = SavedState(storage, worlds.write(storage, states, ranks_of(states, True), 5))
    assert set(state) == {tensor.name for tensor in states.tensors}
    for name, whole in WHOLE.items():
        assert torch.equal(state[f"model.{name}"], whole)
    assert torch.equal(state["optimizer.first_moment.fused"], -WHOLE["fused"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    states = states_of("dp=2,tp=2")
    folder = worlds.write(storage, states, ranks_of(states, True), 5)
    from torch.distributed.checkpoint.state_dict_loader import load

    found: dict[str, Any] = {
        "model": {name: torch.zeros(shape) for name, shape in SHAPES.items()},
        "optimizer": {"first_moment": {"fused": torch.zeros(SHAPES["fused"])}},
        "buffer": {"mean": torch.zeros(3, dtype=torch.float64)},
    }
    load(found, checkpoint_id=tmp_path / folder, no_dist=True)
    assert all(torch.equal(found["model"][name], whole) for name, whole in WHOLE.items())
    assert torch.equal(found["optimizer"]["first_moment"]["fused"], -WHOLE["fused"])
    assert torch.equal(found["buffer"]["mean"], torch.arange(3.0).double())


# -- how much is read


def large(spec: str, shard: Shard | None) -> StateTensors:
    shards = {} if shard is None else {"tp": shard}
    tensors = []
    for index in range(3):
        layout = ParameterLayout(f"w{index}", (512, 1024), torch.float32, True, shards=shards)
        tensors.append(
            StateTensor(
                f"model.w{index}", "parameter", f"w{index}", layout.dtype, layout.shape, layout
            )
        )
    return StateTensors(Mesh.parse(spec), tuple(tensors))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (large("tp=2", Shard(0)), large("tp=4,dp=2", Shard(1))),
        (large("", None), large("tp=8", Shard(1, 2))),
        (large("tp=4", Shard(1)), large("dp=4", None)),
    ],
)
def test_storage_is_read_once_and_hardly_more_than_is_needed(
    tmp_path: Path, source: StateTensors, target: StateTensors
) -> None:
    storage = LocalStorage(tmp_path)
    ranks = [
        RankState(
            {
                t.held: t.layout.local(torch.zeros(t.shape), source.mesh, rank)
                for t in source.tensors
                if t.layout is not None
            }
        )
        for rank in range(source.mesh.size)
    ]
    folder = worlds.write(storage, source, ranks, 1)
    plan = ReadPlan(read_parts(storage, folder, read_commit(storage, folder)), target)
    spans = [(bucket, bucket.span(plan.parts)) for bucket in plan.buckets()]
    needed = sum(tensor.nbytes for tensor in target.tensors)  # each is held somewhere
    assert sum(end - start for _, (start, end) in spans) <= 1.05 * needed
    by_reader = dict.fromkeys(range(target.mesh.size), 0)
    for bucket, (start, end) in spans:
        by_reader[bucket.reader] += end - start
    if target.mesh.axis_size("dp") == 4:
        assert max(by_reader.values()) > 0


# -- damage


class Flipping(worlds.ThreadWorld):
    """Flips a bit on the way from the reader to one rank."""

    def of(self, rank: int) -> Any:
        share = super().of(rank)

        def flip(bucket: Bucket, data: Tensor) -> Tensor:
            found: Tensor = share(bucket, data)
            if rank == 1 and bucket.reader != 1:
                found[len(found) // 2] ^= 4
            return found

        return flip


def fill(states: StateTensors) -> list[dict[str, Tensor]]:
    ranks = ranks_of(states, False)
    parts = [{t.name: t.of(state) for t in states.tensors} for state in ranks]
    return [{n: v for n, v in each.items() if v is not None} for each in parts]


def test_a_bit_flipped_on_the_way_is_found_where_it_arrives(tmp_path: Path) -> None:
    storage, states = LocalStorage(tmp_path), states_of("dp=3")
    folder = worlds.write(storage, states, ranks_of(states, True), 5)
    reports = worlds.load(storage, folder, states, fill(states), Flipping())
    assert reports[1].damage.startswith("__")
    assert reports[0].damage == reports[2].damage == ""


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_damaged_file_is_named_by_all_that_need_it(tmp_path: Path, how: str) -> None:
    storage, states = LocalStorage(tmp_path), states_of("dp=3")
    folder = worlds.write(storage, states, ranks_of(states, True), 5)
    file = tmp_path / folder / "__1_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[800] ^= 1
    file.write_bytes(raw if how == "flipped" else raw[:-1])
    if how == "missing":
        file.unlink()
    reports = worlds.load(storage, folder, states, fill(states))
    assert all("__1_0.distcp" in report.damage for report in reports)


def changed(states: StateTensors, tensors: Sequence[StateTensor]) -> StateTensors:
    return StateTensors(states.mesh, tuple(tensors))


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    storage, states = LocalStorage(tmp_path), states_of("tp=2")
    folder = worlds.write(storage, states, ranks_of(states, True), 5)
    parts = read_parts(storage, folder, read_commit(storage, folder))
    first, *others = states.tensors
    with pytest.raises(UserError, match=r"'model\.rows' is not in the program"):
        ReadPlan(parts, changed(states, others))
    with pytest.raises(UserError, match=r"'model\.more' of the program is not in it"):
        ReadPlan(parts, changed(states, [*states.tensors, replace(first, name="model.more")]))
    with pytest.raises(UserError, match=r"is float32 \[24, 40\], and the program's float32 \[40\]"):
        ReadPlan(parts, changed(states, [replace(first, shape=(40,)), *others]))
    with pytest.raises(UserError, match="another model, optimizer or precision"):
        ReadPlan(parts, changed(states, [replace(first, dtype=torch.bfloat16), *others]))
