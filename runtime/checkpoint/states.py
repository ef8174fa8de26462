"""The tensors of a program's state: which rank holds which part, and which rank writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from msc.ir.layout import ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.pieces import Piece, pieces, whole_piece
from msc.runtime.state import RankState

Kind = Literal["parameter", "optimizer", "buffer"]


@dataclass(frozen=True)
class StateTensor:
    """A whole tensor of the state, under the name that it has in a checkpoint.

    held: its name in the `RankState`; layout: how ranks hold it, None of a buffer, which every rank
    that has it holds whole; writer: of a buffer, the rank that writes it.
    """

    name: str
    kind: Kind
    held: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: ParameterLayout | None
    writer: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def parts(self, mesh: Mesh) -> list[tuple[tuple[Piece, ...], list[int]]]:
        """The different parts that ranks hold, each with all of its ranks, in order.

        A buffer is given to every rank, since only a rank's graph says whether it reads it.
        """
        if self.layout is None:
            return [((whole_piece(self.shape),), list(range(mesh.size)))]
        found: dict[tuple[Piece, ...], list[int]] = {}
        for shard, ranks in _copies(self.layout, mesh):
            found.setdefault(pieces(self.layout, mesh, shard), []).extend(ranks)
        return [(part, sorted(ranks)) for part, ranks in found.items()]

    def of(self, state: RankState) -> Tensor | None:
        """This rank's part of it; None if the rank holds none."""
        if self.kind == "optimizer":
            owner = self.held.partition(".")[2]
            return state.moment(self.held) if owner in state.parameters else None
        return (state.parameters if self.kind == "parameter" else state.buffers).get(self.held)

    def put(self, state: RankState, value: Tensor) -> None:
        """Replace this rank's part."""
        kinds = {"parameter": state.parameters, "optimizer": state.moments, "buffer": state.buffers}
        kinds[self.kind][self.held] = value


def _copies(layout: ParameterLayout, mesh: Mesh) -> Iterator[tuple[int, list[int]]]:
    """Ranks that hold equal parts: the first of them, and all."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        if coordinate.get("pp", 0) in layout.stages:
            key = tuple(coordinate[axis] for axis in layout.shards)
            if layout.data is not None:
                key += (coordinate.get("dp", 0) % layout.data.parts,)
            groups.setdefault(key, []).append(rank)
    for ranks in groups.values():
        yield ranks[0], ranks


def written_by(
    tensors: Sequence[StateTensor], mesh: Mesh, rank: int
) -> list[tuple[StateTensor, tuple[Piece, ...]]]:
    """What `rank` writes: each part of each tensor is written by exactly one rank.

    Of copies on axes other than dp the first is written. Those on dp share the work: the largest
    parts first, each by the coordinate that has the least so far. What ZeRO splits over dp is
    written by those who hold it.
    """
    index = mesh.coordinate(rank).get("dp", 0)
    found: list[tuple[StateTensor, tuple[Piece, ...]]] = []
    for tensor, indices in _shared_work(tensors, mesh, rank):
        if tensor.layout is None and tensor.writer == rank:
            found.append((tensor, (whole_piece(tensor.shape),)))
        elif tensor.layout is not None and index in indices:
            found.append((tensor, pieces(tensor.layout, mesh, rank)))
    return found


def writers(tensors: Sequence[StateTensor], mesh: Mesh, rank: int) -> dict[str, int]:
    """By a tensor's name: which rank writes the part of it that `rank` holds.

    A buffer is in it whether the rank holds it or not.
    """
    here = mesh.coordinate(rank)
    work: dict[int, dict[str, Sequence[int]]] = {}
    found = {}
    for tensor in tensors:
        layout = tensor.layout
        if layout is None:
            found[tensor.name] = tensor.writer
        elif here.get("pp", 0) in layout.stages:
            first = {
                axis: index if axis in layout.shards else _first(layout, axis)
                for axis, index in here.items()
            }
            holder = mesh.rank(first)
            if holder not in work:
                shared = _shared_work(tensors, mesh, holder)
                work[holder] = {each.name: indices for each, indices in shared}
            indices = work[holder][tensor.name]
            if "dp" in here:
                first["dp"] = indices[here["dp"] % len(indices)]
            found[tensor.name] = mesh.rank(first)
    return found


def _shared_work(
    tensors: Sequence[StateTensor], mesh: Mesh, rank: int
) -> Iterator[tuple[StateTensor, Sequence[int]]]:
    """What is written at the coordinate of `rank`, dp aside, and by which coordinates on dp.

    Buffers, which one rank writes, are given to all, without any.
    """
    here = mesh.coordinate(rank)
    loads = dict.fromkeys(range(mesh.axis_size("dp")), 0)
    for tensor in sorted(tensors, key=lambda each: (-each.nbytes, each.name)):
        layout = tensor.layout
        if layout is None:
            yield tensor, ()
            continue
        if not layout.stages or not _is_first(layout, here):
            continue
        indices: Sequence[int] = (min(loads, key=lambda index: (loads[index], index)),)
        if layout.data is not None:
            indices = range(layout.data.parts)  # the first replica
        size = torch.Size(layout.local_shape(mesh, rank)).numel() * tensor.dtype.itemsize
        for index in indices:
            loads[index] += size
        yield tensor, indices


def _is_first(layout: ParameterLayout, here: Mapping[str, int]) -> bool:
    """Whether a coordinate has the first copy, dp aside."""
    return all(
        index == _first(layout, axis)
        for axis, index in here.items()
        if axis not in layout.shards and axis != "dp"
    )


def _first(layout: ParameterLayout, axis: str) -> int:
    """Where on an axis that does not shard it the first copy is."""
    return layout.stages[0] if axis == "pp" else 0


@dataclass(frozen=True)
class StateTensors:
    """All tensors of a program's state, and the mesh that holds them."""

    mesh: Mesh
    tensors: tuple[StateTensor, ...]
