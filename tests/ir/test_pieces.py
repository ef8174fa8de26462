"""Pieces of a rank: together they are the whole tensor, each element once."""

from __future__ import annotations

import pytest
import torch

from msc.ir.layout import ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.pieces import Box, pieces, row_major, whole_piece
from msc.ir.placement import Shard

SHAPE = (12, 4)
SHARDS = {
    "even": (Shard(0), "tp=2", 1),
    "segments": (Shard(0, 3), "tp=2", 3),
    "unequal segments": (Shard(0, (6, 4, 2)), "tp=2", 3),
    "columns": (Shard(1), "tp=4", 1),
    "segments of columns": (Shard(1, 2), "tp=2", 2),
    "uneven": (Shard(0, 1, 4), "tp=2", 1),
    "nothing for the last": (Shard(0, 1, 6), "tp=4", 0),
}


@pytest.mark.parametrize("case", SHARDS)
def test_pieces_of_all_ranks_are_the_whole(case: str) -> None:
    shard, spec, of_last = SHARDS[case]
    mesh = Mesh.parse(spec)
    layout = ParameterLayout("w", SHAPE, torch.float32, True, shards={"tp": shard})
    whole = torch.arange(1.0, 49.0).view(SHAPE)
    found = torch.zeros(SHAPE)
    for rank in range(mesh.size):
        part = layout.local(whole, mesh, rank)
        held = pieces(layout, mesh, rank)
        for piece in held:
            ends = (a + n for a, n in zip(piece.box.offsets, piece.box.lengths, strict=True))
            index = tuple(map(slice, piece.box.offsets, ends))
            assert torch.equal(piece.of(part), whole[index])
            found[index] += piece.of(part)
        assert sum(piece.box.numel for piece in held) == part.numel()
    assert len(held) == of_last
    assert torch.equal(found, whole)


def test_a_piece_of_memory_with_an_offset() -> None:
    flat = torch.arange(20.0)
    part = flat[4:16].view(3, 4)
    piece = whole_piece((3, 4))
    assert torch.equal(piece.of(part), part)
    assert torch.equal(piece.of(part, Box((1, 2), (2, 2))), part[1:, 2:])


def test_boxes() -> None:
    outer = Box((2, 0), (4, 6))
    inner = Box((3, 2), (9, 3)).overlap(outer)
    assert inner == Box((3, 2), (3, 3))
    assert inner.within(outer) == (6 + 2, 3 * 6 + 5)
    assert outer.overlap(Box((6, 0), (1, 6))) is None
    assert whole_piece(()).box.numel == 1
    assert row_major((2, 3, 4)) == (12, 4, 1)
