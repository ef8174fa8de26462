"""Tensors of a safetensors file, read when they are asked for, whole or as a rank's shard."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from msc.ir.errors import UserError
from msc.ir.layout import ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.pieces import Run, index_runs


class SavedTensors(Mapping[str, Tensor]):
    """Name -> tensor; every access reads the file, and nothing of it is kept.

    state_names: those that belong to the plain module's `state_dict` besides the parameters.
    digest: of all parameters' values, as `Program.values_digest`; advice: what to do about a file
    that cannot be read.
    """

    def __init__(
        self,
        file: Path,
        state_names: Sequence[str] = (),
        digest: str = "",
        advice: str = "Save the program again with program.save(folder).",
    ) -> None:
        self.state_names = tuple(state_names)
        self.digest = digest
        opener: Any = safe_open
        try:
            self._file = opener(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}. {advice}") from error
        self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.clone()  # the file's tensors are views of one mapping: a write would show

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return tuple(self._file.get_slice(name).get_shape())

    def shard(
        self, layout: ParameterLayout, mesh: Mesh, rank: int, stored: str | None = None
    ) -> Tensor:
        """What `layout.local` gives of the whole parameter, of which only that part is read.

        stored: its name in the file, by default that of the layout.
        """
        name = stored or layout.name
        if name not in self._names:
            raise KeyError(name)
        view = self._file.get_slice(name)
        part = layout.padded(read_runs(view, index_runs(layout, mesh, rank)), mesh, rank)
        return part.clone(memory_format=torch.contiguous_format)


def read_runs(view: Any, runs: Sequence[Sequence[Run]]) -> Tensor:
    """The given runs of every dim, from anything that takes slices."""
    if not runs:
        whole: Tensor = view[...]
        return whole
    boxes = {
        picks: view[tuple(slice(*dim[index]) for dim, index in zip(runs, picks, strict=True))]
        for picks in itertools.product(*(range(len(dim)) for dim in runs))
    }
    return _join(boxes, runs, ())


def _join(
    boxes: Mapping[tuple[int, ...], Tensor], runs: Sequence[Sequence[Run]], prefix: tuple[int, ...]
) -> Tensor:
    dim = len(prefix)
    if dim == len(runs):
        return boxes[prefix]
    parts = [_join(boxes, runs, (*prefix, index)) for index in range(len(runs[dim]))]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
