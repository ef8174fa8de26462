"""A beat is one datagram, and nothing else is one."""

from __future__ import annotations

import pytest

from msc.runtime.monitor.beat import MAX_BYTES, Beat, RankBeat

RANK = RankBeat(3, "running", "step", 12, 0.5, "send forward:0>4", {"tp": 7})


def test_it_comes_as_it_was_sent() -> None:
    beat = Beat("node7", 5.25, (RANK,), {"eth0": (1, 2, 3)}, ("Xid 79",))
    assert Beat.from_bytes(beat.to_bytes()) == beat
    assert len(beat.to_bytes()) < 200


def test_a_node_with_many_lines_still_beats() -> None:
    beat = Beat("node7", 5.25, (RANK,), lines=("x" * MAX_BYTES,))
    assert Beat.from_bytes(beat.to_bytes()) == Beat("node7", 5.25, (RANK,))


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"[]", b"{}", b"[1,2,3,4,5]", b'["a",1,[[1]],{},[]]']
)
def test_anything_else_is_no_beat(data: bytes) -> None:
    with pytest.raises(ValueError, match="no beat"):
        Beat.from_bytes(data)
