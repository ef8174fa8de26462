"""Stages of several chunks: even work, in the order of the layers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from msc.passes.chunks import balance
from msc.passes.schedules.balance import even_stages
from msc.passes.schedules.stages import Stages


def busiest(costs: list[float], runs: list[list[int]], stages: Stages) -> float:
    loads = [sum(costs[i] for i in run) for run in runs]
    return max(sum(loads[c] for c in stages.chunks(s)) for s in range(stages.count))


def test_a_head_takes_layers_off_the_other_chunk_of_its_stage() -> None:
    costs = [1.0] * 9 + [3.0]
    stages = Stages(2, 2)
    runs = balance(costs, 4)
    assert busiest(costs, runs, stages) == 6
    found = even_stages([1.0] * 10 + [4.0], balance([1.0] * 10 + [4.0], 4), stages)
    assert busiest([1.0] * 10 + [4.0], found, stages) == 7


def test_one_chunk_per_stage_stays() -> None:
    costs = [3.0, 1.0, 1.0, 2.0]
    assert even_stages(costs, balance(costs, 2), Stages(2)) == balance(costs, 2)


@given(
    st.lists(st.integers(1, 9).map(float), min_size=6, max_size=14),
    st.sampled_from([Stages(2, 2), Stages(3, 2), Stages(2, 2, "v"), Stages(2, 3), Stages(1, 4)]),
)
def test_never_worse_and_all_in_order(costs: list[float], stages: Stages) -> None:
    runs = balance(costs, stages.num_chunks)
    found = even_stages(costs, runs, stages)
    assert [i for run in found for i in run] == list(range(len(costs)))
    assert all(found)
    assert busiest(costs, found, stages) <= busiest(costs, runs, stages)
