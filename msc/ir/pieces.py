"""Which parts of a whole tensor a rank holds, as boxes: what storage reads and writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.ir.layout import ParameterLayout
from msc.ir.mesh import Mesh

Run = tuple[int, int]
"""First index and one past the last."""


def index_runs(layout: ParameterLayout, mesh: Mesh, rank: int) -> list[list[Run]]:
    """For each dim the indices of the whole parameter that `rank` holds, in its order, as runs."""
    return [_runs(indices) for indices in layout.held_indices(mesh, rank)]


def _runs(indices: Tensor) -> list[Run]:
    if not len(indices):
        return [(0, 0)]
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    pieces = torch.tensor_split(indices, breaks.tolist())
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: along each dim, where it begins and how long it is."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; 1 of a tensor without dims."""
        return math.prod(self.lengths)

    def overlap(self, other: Box) -> Box | None:
        """What both hold; None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        )
        lengths = tuple(end - start for end, start in zip(ends, offsets, strict=True))
        return Box(offsets, lengths) if all(n > 0 for n in lengths) else None

    def within(self, outer: Box) -> tuple[int, int]:
        """The first element, and one past the last, of this box in `outer`'s row-major order."""
        strides = row_major(outer.lengths)
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        first = sum(a * s for a, s in zip(starts, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(self.lengths, strides, strict=True))
        return first, last + 1


@dataclass(frozen=True)
class Piece:
    """A box of the whole tensor, and where a rank's part, which is contiguous, has it.

    start, strides: of the box in the part's memory, in elements.
    """

    box: Box
    start: int
    strides: tuple[int, ...]

    def of(self, part: Tensor, box: Box | None = None) -> Tensor:
        """The view of `part` that is this piece, or a `box` of the whole tensor inside of it."""
        assert part.is_contiguous()
        inner = box or self.box
        shifts = zip(inner.offsets, self.box.offsets, self.strides, strict=True)
        start = self.start + sum((a - b) * stride for a, b, stride in shifts)
        return part.as_strided(inner.lengths, self.strides, part.storage_offset() + start)


def pieces(layout: ParameterLayout, mesh: Mesh, rank: int) -> tuple[Piece, ...]:
    """The boxes of the whole parameter that `rank` holds where it holds the parameter at all.

    More than one where a dim is split by segments. Elements of a rank's part that belong to no
    piece, such as padding, have no place in the whole tensor.
    """
    runs = index_runs(layout, mesh, rank)
    strides = row_major(layout.local_shape(mesh, rank))  # with what pads it
    begins = [list(itertools.accumulate((e - s for s, e in dim), initial=0)) for dim in runs]
    found = []
    for picks in itertools.product(*(range(len(dim)) for dim in runs)):
        chosen = [dim[index] for dim, index in zip(runs, picks, strict=True)]
        box = Box(tuple(s for s, _ in chosen), tuple(e - s for s, e in chosen))
        places = (dim[index] for dim, index in zip(begins, picks, strict=True))
        start = sum(place * stride for place, stride in zip(places, strides, strict=True))
        if box.numel:
            found.append(Piece(box, start, strides))
    return tuple(found)


def whole_piece(shape: Sequence[int]) -> Piece:
    """A tensor that is held whole, as one piece."""
    return Piece(Box((0,) * len(shape), tuple(shape)), 0, row_major(shape))


def row_major(lengths: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = list(itertools.accumulate(reversed(lengths[1:]), lambda a, b: a * b, initial=1))
    return tuple(reversed(strides))[: len(lengths)] if lengths else ()
