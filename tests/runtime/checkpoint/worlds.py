"""All ranks of a mesh in one process: they write as their writers do, and load as threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.committing import Committer
from msc.runtime.checkpoint.dcp import METADATA, dcp_metadata
from msc.runtime.checkpoint.image import Image
from msc.runtime.checkpoint.loading import Loader, LoadReport
from msc.runtime.checkpoint.manifest import folder_name
from msc.runtime.checkpoint.reading import Bucket, ReadPlan
from msc.runtime.checkpoint.states import StateTensors, written_by
from msc.runtime.checkpoint.storage import Storage
from msc.runtime.checkpoint.writer import PartWriter
from msc.runtime.state import RankState
from tests.runtime.checkpoint.writes import nothing


def filled(image: Image, state: RankState) -> Tensor:
    """The bytes of a rank's image of its state."""
    memory = torch.zeros(image.size, dtype=torch.uint8)
    image.frames_into(memory)
    for place in image.places:
        part = place.tensor.of(state)
        assert part is not None
        place.elements(memory).copy_(place.piece.of(part))
    return memory


def write(
    storage: Storage,
    states: StateTensors,
    ranks: Sequence[RankState],
    step: int,
    facts: Mapping[str, Any] | None = None,
) -> str:
    """Save the states of all ranks; the folder."""
    images = [Image(written_by(states.tensors, states.mesh, r)) for r in range(states.mesh.size)]
    for rank, image in enumerate(images):
        memory = filled(image, ranks[rank])
        writer = PartWriter(storage, rank, "aa", tuple(image.stored()), image.size)
        writer.write(step, memoryview(memory.numpy()))  # type: ignore[arg-type]
    files = {METADATA: dcp_metadata([image.stored() for image in images])}
    committer = Committer(storage, len(images), "aa", files, None, (), nothing, 60.0)
    committer.expect(step, facts or {}, {"history.json": "{}"})
    assert not committer.poll()
    return folder_name(step, "aa")


class ThreadWorld:
    """Gives what a bucket's reader has read to the other ranks, which are threads."""

    def __init__(self) -> None:
        self._data: dict[Bucket, Tensor] = {}
        self._change = threading.Condition()

    def of(self, rank: int) -> Any:
        def share(bucket: Bucket, data: Tensor) -> Tensor:
            with self._change:
                if bucket.reader == rank:
                    self._data[bucket] = data
                    self._change.notify_all()
                assert self._change.wait_for(lambda: bucket in self._data, timeout=60)
                return self._data[bucket].clone()

        return share


def load(
    storage: Storage,
    folder: str,
    states: StateTensors,
    targets: Sequence[Mapping[str, Tensor]],
    world: Any = None,
) -> list[LoadReport]:
    """Fill the targets of all ranks."""
    commit = catalog.read_commit(storage, folder)
    plan = ReadPlan(catalog.read_parts(storage, folder, commit), states)
    world = world or ThreadWorld()

    def run(rank: int) -> LoadReport:
        return Loader(storage, folder, plan, rank, world.of(rank)).load(targets[rank])

    with ThreadPoolExecutor(len(targets)) as pool:
        return list(pool.map(run, range(len(targets))))


def load_states(
    storage: Storage, folder: str, states: StateTensors, ranks: Sequence[RankState]
) -> list[LoadReport]:
    """Replace the state of all ranks."""
    targets: list[dict[str, Tensor]] = []
    for state in ranks:
        parts = {tensor.name: tensor.of(state) for tensor in states.tensors}
        targets.append({n: torch.full_like(p, 77) for n, p in parts.items() if p is not None})
    reports = load(storage, folder, states, targets)
    for state, target in zip(ranks, targets, strict=True):
        for tensor in states.tensors:
            if tensor.name in target:
                tensor.put(state, target[tensor.name])
    return reports
