"""A checkpoint read by one process, tensor by tensor: for tools, not for training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.ir.pieces import Box, row_major
from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.manifest import DamagedError, Part, StoredPiece
from msc.runtime.checkpoint.storage import Storage


@dataclass(frozen=True)
class Description:
    """A whole tensor; dtype as "float32"."""

    dtype: str
    shape: tuple[int, ...]


class SavedState(Mapping[str, Tensor]):
    """Name -> whole tensor, read when it is asked for, in the chunks that it needs, all checked.

    commit: the checkpoint's commit record. Raises `DamagedError`, which names the checkpoint, here
    and at each access.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        with self._named():
            self.commit = catalog.read_commit(storage, folder)
            self.parts = catalog.read_parts(storage, folder, self.commit)
        self.descriptions: dict[str, Description] = {}
        self._pieces: dict[str, list[tuple[Part, StoredPiece]]] = {}
        for part in self.parts:
            for tensor in part.tensors:
                self.descriptions[tensor.name] = Description(tensor.dtype, tensor.shape)
                pieces = self._pieces.setdefault(tensor.name, [])
                pieces += ((part, piece) for piece in tensor.pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.descriptions))

    def __len__(self) -> int:
        return len(self.descriptions)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.descriptions[name].shape
        return self.box(name, Box((0,) * len(shape), shape))

    def file(self, name: str) -> bytes:
        """A file beside the tensors, compared with the commit record."""
        with self._named():
            return catalog.read_file(self._storage, self._folder, name, self.commit.files[name])

    def box(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        with self._named():
            return self._box(name, box)

    def _box(self, name: str, box: Box) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.descriptions[name].dtype)
        result = torch.empty(box.lengths, dtype=dtype)
        found = 0
        for part, stored in self._pieces[name]:
            outer = Box(stored.offsets, stored.lengths)
            inner = outer.overlap(box)
            if inner is None:
                continue
            first, last = (stored.data + n * dtype.itemsize for n in inner.within(outer))
            values = self._range(part, first, last).view(dtype)
            view = values.as_strided(inner.lengths, row_major(stored.lengths))
            start = sum(
                (a - b) * stride
                for a, b, stride in zip(
                    inner.offsets, box.offsets, row_major(box.lengths), strict=True
                )
            )
            result.as_strided(inner.lengths, row_major(box.lengths), start).copy_(view)
            found += inner.numel
        if found != box.numel:
            raise DamagedError(f"'{name}' is not whole in the data files")
        return result

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except DamagedError as error:
            raise DamagedError(f"{self._storage}/{self._folder} is damaged: {error}.") from error

    def _range(self, part: Part, start: int, end: int) -> Tensor:
        first, last = start // part.chunk, -(-end // part.chunk)
        begin = first * part.chunk
        length = min(last * part.chunk, part.size) - begin
        try:
            data = self._storage.read(f"{self._folder}/{part.file}", begin, length)
        except OSError as error:
            raise DamagedError(f"{part.file} cannot be read ({error})") from error
        view = memoryview(data)
        for index in range(first, last):
            at = (index - first) * part.chunk
            problem = part.damaged(index, view[at : at + part.chunk])
            if problem:
                raise DamagedError(problem)
        return torch.frombuffer(bytearray(view[start - begin : end - begin]), dtype=torch.uint8)
