"""Options of a checkpoint that are out of range are refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import msc
from tests.checkpoint.runs import trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "url is ''"),
        ({"url": 3}, "url is 3"),
        ({"every": 0}, "every is 0"),
        ({"every": True}, "every is True"),
        ({"every": 1.5}, "every is 1.5"),
        ({"every": timedelta(0)}, "every is datetime"),
        ({"keep": True}, "keep is True"),
        ({"keep": 0}, "keep is 0"),
        ({"when_busy": "stop"}, "when_busy is 'stop'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(msc.InputError, match=message):
        msc.Checkpoint(**{"url": "x", **options})


def test_saving_needs_a_place() -> None:
    with trainer(None) as run, pytest.raises(msc.InputError, match="checkpoint=msc"):
        run.save()
