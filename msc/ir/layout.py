"""Where a program's parameters, buffers and inputs lie: what a rank needs beside its graph."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from msc.ir.data_shard import DataShard
from msc.ir.mesh import Mesh
from msc.ir.placement import Shard, shard_of, unshard


def rank_class(mesh: Mesh, tp_bounds: Sequence[int], rank: int) -> int:
    """The number of a rank's class: by pipeline stage, and within one by its range on tp.

    tp_bounds: the first tp coordinate of each range of ranks whose shards have equal shapes.
    """
    coordinate = mesh.coordinate(rank)
    place = bisect.bisect_right(tp_bounds, coordinate.get("tp", 0)) - 1
    return coordinate.get("pp", 0) * len(tp_bounds) + place


def class_names(stages: int, tp_bounds: Sequence[int]) -> list[str]:
    """Names of the classes of ranks, in the order of a program's rank graphs."""
    return [
        f"stage{stage}" + (f".tp{first}" if len(tp_bounds) > 1 else "")
        for stage in range(stages)
        for first in tp_bounds
    ]


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter: its whole shape, how mesh axes shard it, and which pipeline stages hold it.

    data: how ZeRO splits that among neighbours on dp; the optimizer's state is split alike.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    stages: tuple[int, ...] = (0,)
    data: DataShard | None = None

    def local(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """The part of the whole parameter that `rank` holds, as a tensor of its own."""
        coordinate = mesh.coordinate(rank)
        for axis, placement in self.shards.items():
            whole = shard_of(whole, placement, mesh.axis_size(axis), coordinate[axis])
        if self.data is not None:
            whole = self.data.shard(whole, self._data_index(coordinate))
        return whole.detach().clone(memory_format=torch.contiguous_format)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of the part that `rank` holds, padding included."""
        shape = self._model_shape(mesh, rank)
        return shape if self.data is None else self.data.shape(shape)

    def held_indices(self, mesh: Mesh, rank: int) -> list[torch.Tensor]:
        """For each dim the indices of the whole parameter that `rank` holds, in its order."""
        coordinate = mesh.coordinate(rank)
        held = [torch.arange(length) for length in self.shape]
        for axis, placement in self.shards.items():
            shape = [-1 if dim == placement.dim else 1 for dim in range(len(held))]
            part = shard_of(
                held[placement.dim].view(shape), placement, mesh.axis_size(axis), coordinate[axis]
            )
            held[placement.dim] = part.reshape(-1)
        if self.data is not None:
            own = held[self.data.dim]
            first, last = self.data.bounds(len(own), self._data_index(coordinate))
            held[self.data.dim] = own[first:last]
        return held

    def padded(self, part: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """The elements at `held_indices` as `rank` holds them."""
        if self.data is None:
            return part
        return self.data.pad(part, self._model_shape(mesh, rank)[self.data.dim])

    def _data_index(self, coordinate: Mapping[str, int]) -> int:
        assert self.data is not None
        return coordinate.get("dp", 0) % self.data.parts

    def _model_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of what the axes other than dp leave to `rank`."""
        shape = list(self.shape)
        coordinate = mesh.coordinate(rank)
        for axis, placement in self.shards.items():
            runs = placement.run_lengths(shape[placement.dim])
            size, index = mesh.axis_size(axis), coordinate[axis]
            shape[placement.dim] = sum(placement.part(run, size, index) for run in runs)
        return tuple(shape)

    def owners(self, mesh: Mesh) -> list[int]:
        """The ranks whose parts make the whole: the first copy of each."""
        here = {name: 0 for name, _ in mesh}
        if "pp" in here:
            here["pp"] = self.stages[0]
        ranks = [here]
        for axis in self.shards:
            ranks = [{**c, axis: i} for c in ranks for i in range(mesh.axis_size(axis))]
        if self.data is not None:
            ranks = [{**c, "dp": i} for c in ranks for i in range(self.data.parts)]
        return [mesh.rank(coordinate) for coordinate in ranks]

    def whole(self, parts: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
        """The whole tensor from the parts of `owners`, in order."""
        tensors = list(parts)
        if self.data is not None:
            tensors = self._without_data_shards(tensors, mesh)
        for axis, placement in reversed(list(self.shards.items())):
            size = mesh.axis_size(axis)
            tensors = [
                unshard(tensors[start : start + size], placement)
                for start in range(0, len(tensors), size)
            ]
        return tensors[0]

    def _without_data_shards(self, tensors: list[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
        assert self.data is not None
        found = []
        for start in range(0, len(tensors), self.data.parts):
            owner = self.owners(mesh)[start]
            length = self._model_shape(mesh, owner)[self.data.dim]
            found.append(self.data.whole(tensors[start : start + self.data.parts], length))
        return found


@dataclass(frozen=True)
class BufferLayout:
    """A buffer that the loss reads; every rank that needs it holds it whole.

    stage: the first pipeline stage whose forward writes it; None for a constant.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int | None = None

    def writer(self, mesh: Mesh) -> int:
        """The first rank whose forward writes it."""
        here = {name: 0 for name, _ in mesh}
        if "pp" in here:
            assert self.stage is not None
            here["pp"] = self.stage
        return mesh.rank(here)


@dataclass(frozen=True)
class InputLayout:
    """An input of the global batch; `batch_dim` None means that every rank reads all of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None

    def local(self, whole: torch.Tensor, mesh: Mesh, rank: int, micro_batches: int) -> torch.Tensor:
        """The rows that `rank` works on: its dp coordinate's part of each micro-batch.

        A micro-batch has the rows that it has on one device, on every mesh.
        """
        size = mesh.axis_size("dp")
        if self.batch_dim is None or size == 1:
            return whole
        placement = Shard(self.batch_dim, micro_batches)
        return shard_of(whole, placement, size, mesh.coordinate(rank)["dp"])
