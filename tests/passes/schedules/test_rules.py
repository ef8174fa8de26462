"""Schedules by name: their numbers of virtual stages, and what is refused."""

from __future__ import annotations

import pytest

from msc.ir.errors import PlanError
from msc.passes.schedules.rules import check_schedule, rules_of, virtual_stages
from msc.passes.schedules.stages import Stages


def test_where_chunks_lie() -> None:
    loop, v = Stages(4, 2), Stages(4, 2, "v")
    assert [loop.chunks(stage) for stage in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [v.chunks(stage) for stage in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [v.of(chunk) for chunk in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert v.beside(3) == [2, 3]
    assert Stages(1, 3).chunks(0) == [0, 1, 2]


def test_the_usual_number_of_virtual_stages() -> None:
    usual = {name: virtual_stages(name, None) for name in ("gpipe", "1f1b", "interleaved", "zb-v")}
    assert usual == {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-v": 2}
    assert virtual_stages("auto", None) is None
    assert virtual_stages("interleaved", 3) == 3


def test_limits() -> None:
    assert rules_of("1f1b", 4, None, 9).in_flight == (4, 3, 2, 1)
    # Narayanan et al., SC 2021: 2 (p - stage - 1) + (v - 1) p forwards to warm up
    assert rules_of("interleaved", 4, 2, 8).held == (11, 9, 7, 5)
    assert rules_of("zb-h1", 4, None, 9).held == (4, 4, 4, 4)
    assert rules_of("zb-v", 4, None, 9).held == (8, 8, 8, 8)
    assert rules_of("zb-v", 4, None, 9).in_flight == (8, 7, 6, 5, 4, 3, 2, 1)


@pytest.mark.parametrize(
    ("name", "virtual", "message"),
    [
        (
            "zigzag",
            None,
            "Schedule 'zigzag' is unknown. The schedules are gpipe, 1f1b, interleaved, zb-h1, "
            "zb-v, auto.",
        ),
        (
            "1f1b",
            2,
            "Schedule '1f1b' has 1 virtual stage per rank of pp, not 2. Schedule 'interleaved' "
            "takes any number. Leave virtual_stages out.",
        ),
        (
            "zb-v",
            3,
            "Schedule 'zb-v' has 2 virtual stages per rank of pp, not 3. Leave virtual_stages out.",
        ),
        ("auto", 0, "virtual_stages is 0; it is a whole number of at least 1."),
        ("gpipe", True, "virtual_stages is True; it is a whole number of at least 1."),
    ],
)
def test_what_is_refused(name: str, virtual: int | None, message: str) -> None:
    with pytest.raises(PlanError) as error:
        check_schedule(name, virtual)
    assert str(error.value) == message


def test_what_is_not() -> None:
    for name, virtual in (("1f1b", 1), ("interleaved", 5), ("gpipe", 2), ("zb-v", 2), ("auto", 3)):
        check_schedule(name, virtual)
