"""Orders: those of the papers, the bubble of the closed forms, limits, and never a standstill."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msc.ir.errors import PlanError
from msc.passes.schedules.list_scheduler import list_schedule
from msc.passes.schedules.rules import UNLIMITED, Rules, rules_of
from msc.passes.schedules.stages import Stages, Step
from msc.passes.schedules.timeline import Costs, Orders, bubble_fraction, makespan, peak_held

NAMED = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


def schedule(
    name: str, stages: int, count: int, virtual: int | None = None
) -> tuple[Rules, Orders, Costs]:
    rules = rules_of(name, stages, virtual, count)
    costs = Costs.equal(rules.stages.num_chunks, rules.split)
    return rules, list_schedule(rules, costs), costs


def idle(name: str, stages: int, count: int, virtual: int | None = None) -> float:
    """The bubble as a multiple of one forward of one chunk."""
    rules, orders, costs = schedule(name, stages, count, virtual)
    work = count * 3 * rules.stages.virtual
    bubble = makespan(orders, rules.stages, costs) - work
    assert bubble_fraction(orders, rules.stages, costs) == pytest.approx(bubble / work)
    return bubble


def text(order: Sequence[Step]) -> str:
    return " ".join(map(str, order))


def test_1f1b() -> None:
    _, orders, _ = schedule("1f1b", 4, 5)
    assert [text(order).replace(f"@{stage}", "") for stage, order in enumerate(orders)] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_interleaved() -> None:
    """Figure 4 of Narayanan et al., SC 2021, with 2 stages."""
    _, orders, _ = schedule("interleaved", 2, 4)
    assert text(orders[0]) == (
        "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0"
    )
    assert text(orders[1]) == (
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1"
    )


def test_zb_h1() -> None:
    _, orders, _ = schedule("zb-h1", 2, 3)
    assert text(orders[0]) == "F0@0 F1@0 B0@0 W0@0 F2@0 B1@0 W1@0 B2@0 W2@0"
    assert text(orders[1]) == "F0@1 B0@1 F1@1 B1@1 W0@1 F2@1 B2@1 W1@1 W2@1"


@pytest.mark.parametrize("stages", range(1, 8))
@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_gpipe_runs_all_forwards_first(stages: int, count: int) -> None:
    for virtual in (1, 3):
        _, orders, _ = schedule("gpipe", stages, count, virtual)
        for order in orders:
            assert [s.kind for s in order] == [
                kind for kind in ("forward", "backward") for _ in range(count * virtual)
            ]
        if count >= stages:
            assert idle("gpipe", stages, count, virtual) == 3 * (stages - 1)


@pytest.mark.parametrize("stages", range(1, 8))
def test_the_bubble_of_1f1b(stages: int) -> None:
    """(p - 1) (F + B), and no more activations than stages follow."""
    for count in (1, 2, 3, 5, 7, 8, 13, 16):
        assert idle("1f1b", stages, count) == 3 * (stages - 1)
        _, orders, _ = schedule("1f1b", stages, count)
        assert [peak_held(o) for o in orders] == [min(count, stages - s) for s in range(stages)]


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("virtual", range(1, 5))
def test_the_bubble_of_interleaved_1f1b(stages: int, virtual: int) -> None:
    """(p - 1) / (v m) of the work: where p divides m, and elsewhere too but for a few larger m."""
    for count in range(stages, 4 * stages):
        rules, orders, costs = schedule("interleaved", stages, count, virtual)
        expected = (stages - 1) / (virtual * count)
        found = bubble_fraction(orders, rules.stages, costs)
        if count % stages == 0 or count < 2 * stages:
            assert found == pytest.approx(expected)
        else:
            assert expected - 1e-9 <= found < 1.3 * expected
        if count % stages == 0 and count > stages and virtual > 1:
            assert [peak_held(order) for order in orders] == list(rules.held)
    for count in range(1, stages):
        assert idle("interleaved", stages, count, virtual) >= 3 * (stages - 1)


@pytest.mark.parametrize("stages", range(1, 8))
def test_the_bubble_of_zb_h1(stages: int) -> None:
    """(p - 1) (F + B - W), with the activations of 1F1B's first stage (Qi et al., table 2)."""
    for count in (1, 2, 3, 5, 7, 8, 13, 16):
        assert idle("zb-h1", stages, count) == stages - 1 + max(0, stages - count)
        _, orders, _ = schedule("zb-h1", stages, count)
        assert [peak_held(order) for order in orders] == [min(count, stages)] * stages


@pytest.mark.parametrize("stages", range(1, 9))
def test_zb_v_has_no_bubble(stages: int) -> None:
    """Every stage works from its first step to its last, at 1F1B's peak memory (2 p halves)."""
    for count in (stages, *range(2 * stages - 1, 2 * stages + 3), 23):
        assert idle("zb-v", stages, count) == stages - 1  # the last one starts so much later
        _, orders, _ = schedule("zb-v", stages, count)
        assert all(peak_held(order) <= 2 * stages for order in orders)


RATES = st.sampled_from([0.01, 0.3, 1.0, 1.7, 40.0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Rules, Costs]:
    """Named rules, and others with limits as low as they may be, at uneven costs."""
    stages, count = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    name = draw(st.sampled_from(NAMED))
    virtual = draw(st.integers(1, 3)) if name in ("gpipe", "interleaved") else None
    rules = rules_of(name, stages, virtual, count)
    if name != "interleaved" and draw(st.booleans()):
        held = draw(st.integers(rules.stages.virtual, 20))
        rules = Rules(
            rules.stages,
            count,
            draw(st.booleans()),
            draw(st.integers(1, count)),
            False,
            (draw(st.sampled_from([1, 2, UNLIMITED])),) * rules.stages.num_chunks,
            (held,) * stages,
        )
    times = st.lists(RATES, min_size=rules.stages.num_chunks, max_size=rules.stages.num_chunks)
    forward, backward, weight = (tuple(draw(times)) for _ in range(3))
    costs = Costs(forward, backward, weight, draw(RATES))
    return rules, costs


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_never_a_standstill(problem: tuple[Rules, Costs]) -> None:
    """Each step runs once, after what it needs, within the limits, on uneven stages as well."""
    rules, costs = problem
    orders = list_schedule(rules, costs)
    assert makespan(orders, rules.stages, costs) > 0
    kinds = ("forward", "backward", "weight")[: 2 + rules.split]
    for stage, order in enumerate(orders):
        assert peak_held(order) <= rules.held[stage]
        assert len(order) == len(set(order))
        for chunk in rules.stages.chunks(stage):
            in_flight = 0
            for step in order:
                if step.chunk == chunk:
                    in_flight += {"forward": 1, "backward": -1, "weight": 0}[step.kind]
                    assert in_flight <= rules.in_flight[chunk]
            for kind in kinds:
                found = [s.micro_batch for s in order if (s.kind, s.chunk) == (kind, chunk)]
                assert found == list(range(rules.micro_batches))


def test_limits_that_no_order_keeps() -> None:
    rules = Rules(Stages(2, 3), 2, False, 1, False, (UNLIMITED,) * 6, (2, 2))
    with pytest.raises(PlanError, match="No order of steps keeps to these rules"):
        list_schedule(rules, Costs.equal(6, False))
