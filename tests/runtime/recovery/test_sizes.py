"""What is decided of fewer ranks: on how many a run goes on, where, and when it tries for more."""

from __future__ import annotations

from msc.runtime.recovery.places import Place, Places
from msc.runtime.recovery.sizes import Size, Sizes

FULL = [Place(node, slot) for node in range(2) for slot in range(2)]


def test_the_most_ranks_that_all_programs_can_run_on() -> None:
    sizes = Sizes()
    assert sizes.largest(8, 1) is None
    assert "no rank has told" in sizes.why_not(8, 1)
    sizes.hear([[8, 4, 1], [6, 3, 4], [4, 2, 2], [2, 1, 4]], saves=True)
    assert sizes.largest(7, 1) == Size(6, 3, 4)
    sizes.hear([[8, 8, 1], [4, 4, 2], [2, 2, 4]], saves=True)  # another program of the script
    assert sizes.largest(7, 1) == Size(4, 2, 2)
    assert sizes.of(8) == Size(8, 4, 1)
    assert sizes.largest(3, 3) is None
    assert sizes.why_not(3, 3) == "3 are left, 3 are wanted, and its program runs on 8, 4, 2"
    assert sizes.saved
    sizes.hear([[8, 8, 1]], saves=False)
    assert "runs on 8 only (compile it in the script" in sizes.why_not(3, 1)
    assert not sizes.saved


def test_a_place_is_lost_when_two_processes_in_a_row_end_before_they_meet() -> None:
    places = Places(FULL)
    assert not places.ended_early(FULL[1])
    places.met(FULL[1])
    assert not places.ended_early(FULL[1])
    assert places.ended_early(FULL[1])


def test_lost_places_are_tried_again_and_again_more_seldom() -> None:
    places = Places(FULL)
    assert not places.are_all_back([])
    places.lose(FULL[1], 100.0)
    places.lose(FULL[2], 101.0)
    assert places.usable == [FULL[0], FULL[3]]
    assert places.to_try(101.9) == []
    assert places.to_try(102.0) == [FULL[1]]
    places.lose(FULL[1], 102.0)  # tried in vain
    assert places.to_try(105.9) == [FULL[2]]
    assert places.to_try(106.0) == [FULL[1], FULL[2]]
    assert not places.are_all_back([FULL[1]])
    assert places.are_all_back([FULL[2], FULL[1]])
    places.restore()
    assert places.usable == FULL
    places.lose(FULL[1], 1000.0)  # soon again: it waits as long as it would have
    assert places.to_try(1007.9) == []
    assert places.to_try(1008.0) == [FULL[1]]
    for _ in range(20):
        places.lose(FULL[1], 0.0)
    assert places.to_try(300.0) == [FULL[1]]
