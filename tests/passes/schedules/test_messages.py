"""Who reads what a step passes on, and when a sender may wait without holding anybody up."""

from __future__ import annotations

import pytest

from msc.passes.schedules.list_scheduler import list_schedule
from msc.passes.schedules.messages import receiver, releases
from msc.passes.schedules.rules import rules_of
from msc.passes.schedules.stages import Step
from msc.passes.schedules.timeline import Costs, start_times


def test_readers() -> None:
    assert receiver(Step("forward", 2, 0), 3) == Step("forward", 2, 1)
    assert receiver(Step("backward", 2, 2), 3) == Step("backward", 2, 1)
    assert receiver(Step("forward", 2, 2), 3) is None
    assert receiver(Step("backward", 2, 0), 3) is None
    assert receiver(Step("weight", 2, 1), 3) is None


def found(name: str, stages: int, count: int) -> list[dict[str, list[str]]]:
    rules = rules_of(name, stages, None, count)
    costs = Costs.equal(rules.stages.num_chunks, rules.split)
    orders = list_schedule(rules, costs)
    starts = start_times(orders, rules.stages, costs)
    return [
        {str(s): list(map(str, sent)) for s, sent in releases(o, rules.stages, starts).items()}
        for o in orders
    ]


def test_a_send_is_waited_for_after_its_reader_has_started() -> None:
    assert found("1f1b", 2, 3) == [
        {"B0@0": ["F0@0"], "F2@0": ["F1@0"], "B2@0": ["F2@0"]},
        {"B1@1": ["B0@1"], "B2@1": ["B1@1"]},
    ]


def test_what_stays_on_a_stage_is_not_sent() -> None:
    waits = found("zb-v", 2, 4)
    sent = {each for stage in waits for several in stage.values() for each in several}
    assert not any(each.startswith("F") and each.endswith("@1") for each in sent)
    assert any(each.endswith("@2") for each in sent)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_waits_never_point_back_in_time(name: str) -> None:
    """At each wait its receive has begun earlier: so no waits can go round in a ring."""
    rules = rules_of(name, 4, None, 11)
    costs = Costs.equal(rules.stages.num_chunks, rules.split)
    orders = list_schedule(rules, costs)
    starts = start_times(orders, rules.stages, costs)
    for order in orders:
        for step, sent in releases(order, rules.stages, starts).items():
            for each in sent:
                reader = receiver(each, rules.stages.num_chunks)
                assert reader is not None
                assert starts[reader] < starts[step]
                assert order.index(each) < order.index(step)
