"""The model of a fused kernel's tiles: by hand, within bounds, and the shares to be hidden."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msc.cost.tile_schedule import TileSchedule, gather, grouped, scatter


def shape(m: int, n: int, ratio: float) -> TileSchedule:
    """8 ranks, 132 programs, tiles of 128 by 256; the link takes `ratio` times the product."""
    schedule = TileSchedule(8, m // 8 // 128, n // 256, 132, 1.0, 0.0)
    return dataclasses.replace(schedule, chunk_s=ratio * schedule.gemm_s / 7)


def test_by_hand() -> None:
    """2 ranks, 2 tiles each, 1 program, the other's chunk comes after 3 tiles' time."""
    schedule = TileSchedule(2, 2, 1, 1, tile_s=1.0, chunk_s=3.0)
    assert gather(schedule).fused_s == 5.0  # two tiles, a wait of one, two tiles
    # in two parts the third tile starts at 2 and the fourth waits until 3: half as much is lost
    parts = dataclasses.replace(schedule, splits=2)
    assert gather(parts).fused_s == 4.0
    # two tiles are sent from 1 and from 2.5 on, the second is there at 4, when the own are made
    assert scatter(schedule).fused_s == 4.0
    assert scatter(schedule, sum_s=0.5).fused_s == 4.5
    timeline = gather(schedule)
    assert (timeline.gemm_s, timeline.link_s) == (4.0, 3.0)
    assert timeline.hidden == pytest.approx(2 / 3)
    assert timeline.speedup == pytest.approx(7 / 5)


@pytest.mark.parametrize("ratio", [0.29, 0.4, 0.5])
@pytest.mark.parametrize(("m", "n"), [(8192, 4608), (8192, 6144), (8192, 7168), (16384, 6144)])
def test_from_eight_waves_on_all_but_all_is_hidden(m: int, n: int, ratio: float) -> None:
    schedule = shape(m, n, ratio)
    assert schedule.waves > 8
    assert gather(schedule).hidden >= 0.95
    assert scatter(schedule).hidden >= 0.95


def test_as_much_communication_as_work() -> None:
    timeline = gather(shape(8192, 6144, 1.0))
    assert timeline.hidden == pytest.approx(0.83, abs=0.005)
    assert timeline.speedup == pytest.approx(1.71, abs=0.005)


def test_few_waves_hide_less() -> None:
    assert gather(shape(2048, 6144, 0.29)).hidden == pytest.approx(0.71, abs=0.005)


@given(
    ranks=st.integers(2, 8),
    rows=st.integers(1, 6),
    columns=st.integers(1, 9),
    programs=st.integers(1, 40),
    chunk_s=st.floats(0, 20),
    splits=st.integers(1, 4),
)
def test_never_faster_than_either_part_nor_slower_than_both(
    ranks: int, rows: int, columns: int, programs: int, chunk_s: float, splits: int
) -> None:
    schedule = TileSchedule(ranks, rows, columns, programs, 1.0, chunk_s, 4, splits)
    for timeline in (gather(schedule), scatter(schedule)):
        least = max(timeline.gemm_s, timeline.link_s)
        assert least * (1 - 1e-9) <= timeline.fused_s
        assert timeline.fused_s <= (timeline.gemm_s + timeline.link_s) * (1 + 1e-9)


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), group=st.integers(1, 9))
def test_every_tile_comes_once(rows: int, columns: int, group: int) -> None:
    tiles = [grouped(index, rows, columns, group) for index in range(rows * columns)]
    assert set(tiles) == {(row, column) for row in range(rows) for column in range(columns)}
