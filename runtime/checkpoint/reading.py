"""Which bytes of a checkpoint each rank needs, and who reads them: each byte by one rank only.

A data file is read in the chunks that have digests. Every rank computes, from layouts alone, which
ranks need a chunk; runs of chunks with the same ranks are split into buckets, and the ranks take
turns as a bucket's reader. So ranks that differ on dp share the work of reading what they all need,
and a checkpoint of any layout is read once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msc.ir.errors import UserError
from msc.ir.pieces import Box, Piece
from msc.runtime.checkpoint.image import dtype_name
from msc.runtime.checkpoint.manifest import Part, StoredPiece, StoredTensor
from msc.runtime.checkpoint.states import StateTensor, StateTensors

BUCKET = 8 << 20
"""Bytes that are read, checked and sent in one go, at most."""


@dataclass(frozen=True)
class Bucket:
    """Chunks `first` to `last` (one past) of a part's data file, for `ranks`, read by `reader`."""

    part: int
    first: int
    last: int
    ranks: tuple[int, ...]
    reader: int

    def span(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Its first byte in the file, and one past the last."""
        part = parts[self.part]
        return self.first * part.chunk, min(self.last * part.chunk, part.size)


@dataclass(frozen=True)
class Overlap:
    """A box of the whole tensor that a stored piece has and a rank's part needs.

    start, end: its bytes in the data file; from the first to the last of them.
    """

    part: int
    tensor: StateTensor
    stored: StoredPiece
    piece: Piece
    box: Box
    start: int
    end: int


class ReadPlan:
    """What a world of ranks with the states `wanted` reads of a checkpoint with these parts.

    Raises `UserError` if the checkpoint is of another model or optimizer.
    """

    def __init__(self, parts: Sequence[Part], wanted: StateTensors) -> None:
        self.parts = parts
        self.wanted = wanted
        self._stored = _stored(parts)
        check_same_model({name: tensor for name, (tensor, _) in self._stored.items()}, wanted)
        self._needed: dict[int, dict[int, int]] = {}  # part -> chunk -> ranks, as bits
        for tensor in wanted.tensors:
            for pieces, ranks in tensor.parts(wanted.mesh):
                mask = sum(1 << rank for rank in ranks)
                for overlap in self._overlaps(tensor, pieces):
                    chunk = parts[overlap.part].chunk
                    needed = self._needed.setdefault(overlap.part, {})
                    for index in range(overlap.start // chunk, -(-overlap.end // chunk)):
                        needed[index] = needed.get(index, 0) | mask

    def buckets(self) -> list[Bucket]:
        """All buckets, in the order in which every rank takes part in its own."""
        runs: dict[int, list[tuple[int, int, int]]] = {}
        for number, needed in sorted(self._needed.items()):
            per_bucket = max(1, BUCKET // self.parts[number].chunk)
            for mask, first, last in _runs(needed):
                for start in range(first, last, per_bucket):
                    end = min(start + per_bucket, last)
                    runs.setdefault(mask, []).append((number, start, end))
        result = []
        for mask in sorted(runs):
            ranks = tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
            for turn, (number, start, end) in enumerate(runs[mask]):
                result.append(Bucket(number, start, end, ranks, ranks[turn % len(ranks)]))
        return result

    def needed_by(self, rank: int) -> Iterator[Overlap]:
        """What `rank` takes out of the chunks."""
        for tensor in self.wanted.tensors:
            for pieces, ranks in tensor.parts(self.wanted.mesh):
                if rank in ranks:
                    yield from self._overlaps(tensor, pieces)

    def _overlaps(self, tensor: StateTensor, pieces: Iterable[Piece]) -> Iterator[Overlap]:
        size = tensor.dtype.itemsize
        for number, stored in self._stored[tensor.name][1]:
            outer = Box(stored.offsets, stored.lengths)
            for piece in pieces:
                box = piece.box.overlap(outer)
                if box is not None:
                    first, last = box.within(outer)
                    start, end = stored.data + first * size, stored.data + last * size
                    yield Overlap(number, tensor, stored, piece, box, start, end)


def _runs(needed: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """(ranks, first chunk, one past the last) of consecutive chunks that the same ranks need."""
    chunks = sorted(needed)
    key = {chunk: (needed[chunk], chunk - place) for place, chunk in enumerate(chunks)}
    for (mask, _), found in itertools.groupby(chunks, key=key.__getitem__):
        run = list(found)
        yield mask, run[0], run[-1] + 1


class Described(Protocol):
    """Anything that has a tensor's dtype, as "float32", and its shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


_Stored = Mapping[str, tuple[StoredTensor, list[tuple[int, StoredPiece]]]]
"""By name: what a part says of the tensor, and its pieces, each with the number of its part."""


def _stored(parts: Sequence[Part]) -> _Stored:
    found: dict[str, tuple[StoredTensor, list[tuple[int, StoredPiece]]]] = {}
    for number, part in enumerate(parts):
        for tensor in part.tensors:
            pieces = found.setdefault(tensor.name, (tensor, []))[1]
            pieces += ((number, piece) for piece in tensor.pieces)
    return found


def check_same_model(stored: Mapping[str, Described], wanted: StateTensors) -> None:
    """Raise `UserError`, which names the differences, unless both have the same tensors."""
    expected = {t.name: (dtype_name(t.dtype), t.shape) for t in wanted.tensors}
    lines = [f"  '{name}' of the program is not in it" for name in expected.keys() - stored.keys()]
    for name, tensor in stored.items():
        if name not in expected:
            lines.append(f"  its '{name}' is not in the program")
        elif (tensor.dtype, tensor.shape) != expected[name]:
            dtype, shape = expected[name]
            lines.append(
                f"  its '{name}' is {tensor.dtype} {list(tensor.shape)}, and the program's "
                f"{dtype} {list(shape)}"
            )
    if lines:
        shown = sorted(lines)[:6]
        more = [f"  and {len(lines) - 6} more"] if len(lines) > 6 else []
        raise UserError(
            "The checkpoint is of another model, optimizer or precision:\n"
            + "\n".join([*shown, *more])
            + "\nCompile the model with the optimizer and precision with which it was trained, or "
            "give another folder."
        )
