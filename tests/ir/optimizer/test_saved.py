"""An optimizer as plain data is the same optimizer."""

from __future__ import annotations

import json
import math

import pytest

import msc
from msc.ir.optimizer import Optimizer
from msc.ir.optimizer.saved import OPTIMIZERS, optimizer_from_json, optimizer_to_json

RATE = msc.LearningRate.wsd(1e-3, steps=100, warmup=10, decay=20)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(kind() for kind in OPTIMIZERS.values()),
        msc.AdamW(lr=RATE, betas=(0.8, 0.9), max_norm=math.inf, skip_nonfinite=False),
        msc.SGD(momentum=0.9, nesterov=True, groups=[msc.ParameterGroup(["a", "b"], lr=RATE)]),
        msc.LAMB(groups=[msc.ParameterGroup("*", max_dims=1, betas=(0.1, 0.2))]),
    ],
    ids=str,
)
def test_there_and_back(optimizer: Optimizer) -> None:
    text = json.dumps(optimizer_to_json(optimizer), allow_nan=False)
    found = optimizer_from_json(json.loads(text))
    assert found == optimizer
    assert type(found) is type(optimizer)
    assert hash(found) == hash(optimizer)
    assert json.dumps(optimizer_to_json(found)) == text
