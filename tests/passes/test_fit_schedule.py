"""Schedule "auto" under a bound: predicted memory decides, not the estimate it was chosen by."""

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


def compiled(schedule: str, memory: int | None = None) -> msc.Program:
    model = models.GPT(width=64, heads=4, layers=4)
    return msc.compile(model, models.tokens(), schedule=schedule, memory=memory, **OPTIONS)


def test_what_fits_by_name_is_found() -> None:
    needed = max(compiled("zb-v").memory_bytes())
    assert max(compiled("auto").memory_bytes()) > needed  # the first choice does not fit
    assert max(compiled("auto", needed).memory_bytes()) <= needed


def test_where_nothing_fits_the_least_is_named() -> None:
    least = max(compiled("zb-v").memory_bytes())
    with pytest.raises(msc.PlanError, match=r"needs [\d,]+ bytes per rank") as error:
        compiled("auto", least // 2)
    needed = int(str(error.value).partition("needs ")[2].partition(" bytes")[0].replace(",", ""))
    assert needed <= least
