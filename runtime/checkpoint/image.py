"""The image of a rank's data file: where each piece of the state lies in it.

Every piece is an item as `torch.save` writes a tensor, so that torch.distributed.checkpoint can
read it, and the bytes around the elements are made once: a save only copies elements in between.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy
import torch
from torch import Tensor

from msc.ir.pieces import Piece
from msc.runtime.checkpoint.manifest import StoredPiece, StoredTensor
from msc.runtime.checkpoint.states import StateTensor

_ALIGNMENT = 64  # of items, so that the elements of each, which torch.save aligns, are aligned


@dataclass(frozen=True)
class Place:
    """One piece in the image."""

    tensor: StateTensor
    piece: Piece
    start: int
    frame: Frame

    @property
    def data(self) -> int:
        """Where the elements begin."""
        return self.start + len(self.frame.before)

    def elements(self, memory: Tensor) -> Tensor:
        """The view of an image that has the elements."""
        raw = memory[self.data : self.data + self.frame.nbytes]
        return raw.view(self.tensor.dtype).view(self.piece.box.lengths)


@dataclass(frozen=True)
class Frame:
    """What torch.save writes before and after the elements of a contiguous tensor."""

    before: bytes
    after: bytes
    nbytes: int

    @property
    def length(self) -> int:
        """Of the whole item."""
        return len(self.before) + self.nbytes + len(self.after)


class Image:
    """The places of all pieces that a rank writes; `size` is that of the file."""

    def __init__(self, written: Sequence[tuple[StateTensor, tuple[Piece, ...]]]) -> None:
        self.places: list[Place] = []
        at = 0
        for tensor, found in written:
            for piece in found:
                made = frame(tensor.dtype, piece.box.lengths)
                self.places.append(Place(tensor, piece, at, made))
                at += -(-made.length // _ALIGNMENT) * _ALIGNMENT
        self.size = at

    def frames_into(self, memory: Tensor) -> None:
        """Write everything but the elements into a slot: uint8 of `size`, zeros so far."""
        view = memory.numpy()
        for place in self.places:
            end = place.start + place.frame.length
            view[place.start : place.data] = numpy.frombuffer(place.frame.before, numpy.uint8)
            after = numpy.frombuffer(place.frame.after, numpy.uint8)
            view[end - len(place.frame.after) : end] = after

    def stored(self) -> list[StoredTensor]:
        """What the part's record says of the file."""
        found: dict[str, tuple[StateTensor, list[StoredPiece]]] = {}
        for place in self.places:
            box = place.piece.box
            stored = StoredPiece(
                box.offsets, box.lengths, place.start, place.frame.length, place.data
            )
            found.setdefault(place.tensor.name, (place.tensor, []))[1].append(stored)
        return [
            StoredTensor(name, dtype_name(tensor.dtype), tensor.shape, tuple(stored))
            for name, (tensor, stored) in found.items()
        ]


def dtype_name(dtype: torch.dtype) -> str:
    """As "float32"."""
    return str(dtype).removeprefix("torch.")


@cache
def frame(dtype: torch.dtype, lengths: tuple[int, ...]) -> Frame:
    """The frame of tensors of this dtype and shape; no checksum of the elements is in it."""
    tensor = torch.empty(lengths, dtype=dtype)  # never written to, so no page of it exists
    recorder = _Recorder(tensor.data_ptr())
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(checksums)
    assert recorder.after is not None
    return Frame(
        recorder.before.getvalue(), recorder.after.getvalue(), tensor.numel() * dtype.itemsize
    )


class _Recorder:
    """A file that keeps what is written to it, but for the elements at `address`."""

    def __init__(self, address: int) -> None:
        self._address = address
        self.before = io.BytesIO()
        self.after: io.BytesIO | None = None

    def write(self, data: memoryview) -> int:
        size = len(data)
        if size and numpy.frombuffer(data, numpy.uint8).ctypes.data == self._address:
            self.after = io.BytesIO()
        else:
            (self.after or self.before).write(data)
        return size

    def flush(self) -> None:
        pass
