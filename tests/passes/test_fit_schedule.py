"""Schedule "auto": predicted memory and simulated steps decide, not what it was estimated by."""

from __future__ import annotations

from typing import Any

import pytest

import msc
from tests import models

OPTIONS: dict[str, Any] = {
    "mesh": "pp=2,dp=2",
    "microbatches": 4,
    "zero": 2,
    "optimizer": msc.AdamW(),
}


def compiled(schedule: str, memory: int | None = None, **options: Any) -> msc.Program:
    model = models.GPT(width=64, heads=4, layers=4)
    options = {**OPTIONS, **options}
    return msc.compile(model, models.tokens(), schedule=schedule, memory=memory, **options)


def test_what_fits_by_name_is_found() -> None:
    needed = max(compiled("zb-v").memory_bytes())
    assert max(compiled("1f1b").memory_bytes()) > needed
    assert max(compiled("auto", needed).memory_bytes()) <= needed


def test_where_nothing_fits_the_least_is_named() -> None:
    least = max(compiled("zb-v").memory_bytes())
    with pytest.raises(msc.PlanError, match=r"needs [\d,]+ bytes per rank") as error:
        compiled("auto", least // 2)
    needed = int(str(error.value).partition("needs ")[2].partition(" bytes")[0].replace(",", ""))
    assert needed <= least


def test_without_a_bound_no_named_schedule_is_better_with_the_memory_of_1f1b() -> None:
    auto, usual, other = (compiled(name) for name in ("auto", "1f1b", "zb-v"))
    assert max(other.memory_bytes()) <= max(usual.memory_bytes())
    assert max(auto.memory_bytes()) <= max(usual.memory_bytes())
    assert (
        auto.report.schedule.bubble <= other.report.schedule.bubble < usual.report.schedule.bubble
    )


def test_on_a_cluster_the_simulated_step_decides() -> None:
    auto, usual, other = (compiled(name, cluster="a100") for name in ("auto", "1f1b", "zb-v"))
    assert max(auto.memory_bytes()) <= max(usual.memory_bytes())
    seconds = [each.simulate("a100").step_seconds for each in (auto, usual, other)]
    assert seconds[0] <= min(seconds[1:])
