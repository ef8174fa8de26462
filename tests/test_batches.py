"""The data of a rank goes on where a checkpoint left it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import msc
from msc.batches import Batches
from tests.checkpoint.job import Rows, Stateful, tokens
from tests.checkpoint.runs import program, trainer

CPU = torch.device("cpu")


def test_the_data_goes_on_where_it_was() -> None:
    for data in (Rows(), [tokens(step) for step in range(5)], Stateful()):
        before = Batches(program(), 0, data, CPU)
        for step in range(3):
            before.next(step)
        position = json.loads(json.dumps(before.position()))
        again = Stateful() if isinstance(data, Stateful) else data
        after = Batches(program(), 0, again, CPU)
        after.seek(3, position)
        found = after.next(3)
        assert found is not None
        assert torch.equal(found["ids"], tokens(3)[0])


def test_data_that_ends_before_its_position() -> None:
    with pytest.raises(msc.InputError, match="ended at step 2, and the checkpoint is of step 3"):
        Batches(program(), 0, [tokens()] * 2, CPU).seek(3, None)


def test_a_position_without_json_is_refused_at_the_start(tmp_path: Path) -> None:
    class Odd(Rows):
        def state_dict(self) -> dict[str, Any]:
            return {"version": {1}}

    with pytest.raises(msc.InputError, match=r"state_dict\(\) of the data has no JSON"):
        trainer(tmp_path, data=Odd())
