"""Schedule "auto": the first to end of those that fit."""

from __future__ import annotations

import itertools

from msc.passes.schedules.list_scheduler import list_schedule
from msc.passes.schedules.rules import Rules, rules_of
from msc.passes.schedules.schedule import Schedule
from msc.passes.schedules.search import Cut, candidates, ranked_schedules
from msc.passes.schedules.timeline import Costs, makespan, peak_held


def layers(rules: Rules, num_layers: int, transfer: float = 0.0, head: float = 0.0) -> Cut:
    """Equal layers, dealt out to the chunks in order; the last chunk has a head beside them."""
    chunks = rules.stages.num_chunks
    borders = [num_layers * chunk // chunks for chunk in range(chunks + 1)]
    runs = [list(range(a, b)) for a, b in itertools.pairwise(borders)]
    sizes = [float(len(run)) for run in runs]
    work = tuple([*sizes[:-1], sizes[-1] + head])
    weight = work if rules.split else (0.0,) * chunks
    backward = work if rules.split else tuple(2 * each for each in work)
    state = tuple(sum(sizes[c] for c in rules.stages.chunks(s)) for s in range(rules.stages.count))
    return Cut(runs, Costs(work, backward, weight, transfer), tuple(sizes), state)


def best(memory: float | None = None, virtual: int | None = None, **changes: float) -> Schedule:
    return next(
        ranked_schedules(4, virtual, 8, 16, lambda rules: layers(rules, 16, **changes), memory)
    )


def time(schedule: Schedule) -> float:
    return makespan(schedule.orders, schedule.stages, schedule.modelled)


def test_equal_layers_have_no_bubble() -> None:
    found = best()
    assert found.name == "zb-v"
    assert time(found) == 8 * 3 * 4 + 2 * 3  # the last stage starts 3 chunks of 2 layers later


def test_slow_transfers_speak_against_chunks_and_for_more_in_flight() -> None:
    found = best(memory=64.0, transfer=8.0)
    assert found.stages.virtual == 1
    rules = rules_of("1f1b", 4, None, 8)
    costs = layers(rules, 16, transfer=8.0).costs
    usual = list_schedule(rules, Costs.equal(4, False))
    assert time(found) < makespan(usual, rules.stages, costs)


def test_no_more_memory_than_1f1b_without_a_bound() -> None:
    found = best(transfer=8.0)
    sizes = layers(found.rules, 16).activations
    assert all(peak_held(order, sizes) <= 16 for order in found.orders)


def test_a_bound_counts_state_and_activations() -> None:
    found = best(memory=14.0)
    cut = layers(found.rules, 16)
    for order, state in zip(found.orders, cut.state, strict=True):
        assert state + peak_held(order, cut.activations) <= 14.0
    assert "fewer in flight" in found.name
    assert time(found) >= time(best())


def test_the_smallest_where_nothing_fits() -> None:
    found = best(memory=1.0)
    most = max(peak_held(order, layers(found.rules, 16).activations) for order in found.orders)
    assert most <= 16


def test_no_named_schedule_is_better() -> None:
    """With a head of half a stage's work, and with transfers."""
    for virtual in (None, 1, 2, 3):
        found = best(memory=1e9, virtual=virtual, transfer=0.3, head=6.0)
        many = (virtual,) if virtual is not None else (1, 2, 3, 4)
        for _, rules, _ in candidates(4, many, 8):
            costs = layers(rules, 16, transfer=0.3, head=6.0).costs
            planned = Costs.equal(rules.stages.num_chunks, rules.split)
            assert time(found) <= makespan(list_schedule(rules, planned), rules.stages, costs)
        assert found.stages.virtual in many


def test_a_few_rounds_stand_for_many_micro_batches() -> None:
    found = next(ranked_schedules(4, None, 203, 16, lambda rules: layers(rules, 16), None))
    assert found.name == "zb-v"
    assert time(found) == 203 * 3 * 4 + 2 * 3


def test_of_what_follows_the_best_first_comes_what_may_fit_by_its_end() -> None:
    _, *rest = ranked_schedules(4, None, 8, 16, lambda rules: layers(rules, 16), None)
    assert len(rest) > 20
    whole = 16.0 + 4  # 1F1B's first stage: 4 layers of 4 micro-batches, and its parameters
    needed = [
        max(peak_held(o, layers(s.rules, 16).activations) for o in s.orders) + 4 for s in rest
    ]
    fit = [need <= 1.15 * whole for need in needed]
    number = fit.index(False)
    assert number > 5
    assert not any(fit[number:])
    assert [time(each) for each in rest[:number]] == sorted(time(each) for each in rest[:number])
    assert needed[number:] == sorted(needed[number:])
