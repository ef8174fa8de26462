"""Every rule of the table, on random calls and shards, against the whole call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from msc.ir.placement import Split
from msc.passes.sharding.rule import Rule, factors
from msc.passes.sharding.rules import TABLE, rule_for
from msc.testing.samples import SAMPLERS, Draw
from msc.testing.shards import check_rule

aten = torch.ops.aten
msc_ops = torch.ops.msc

OPS = [op for line in TABLE for op in line.ops]
LONG = settings.get_current_profile_name() == "long"
PER_LINE = 4000 if LONG else 104
"""Calls drawn for each line of the table, shared by its ops."""
SHARE = {op: math.ceil(PER_LINE / len(line.ops)) for line in TABLE for op in line.ops}

NEVER_SHARDED = [
    msc_ops.rng_key.default,
    *(aten.min.default, aten.prod.default, aten.var.default, aten.std.default),
    *(aten.var_mean.default, aten.std_mean.default, aten.nanmean.default, aten.median.default),
    *(aten.aminmax.default, aten.trace.default),
    *(aten.any.default, aten.all.default, aten.count_nonzero.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step),
    *(aten.linspace.default, aten.eye.default, aten.scalar_tensor.default),
]
"""Ops of which no dim can be sharded."""


def test_every_op_stands_in_one_line_and_has_samples() -> None:
    assert len(set(OPS)) == len(OPS)
    assert {str(op) for op in OPS} == {str(op) for op in SAMPLERS}


def refined(draw: Draw, rule: Rule) -> list[tuple[str, Split]]:
    """Random splits of the rule's factors: equal runs, two unequal ones, and in units."""
    found: list[tuple[str, Split]] = []
    for name, length in factors(rule).items():
        if length > 1:
            cut = draw.count(1, length - 1)
            found += [(name, Split(draw.pick([2, 3]))), (name, Split((cut, length - cut)))]
            unit = draw.pick([d for d in range(1, length + 1) if length % d == 0])
            found.append((name, Split(1, unit)))
    return found


@pytest.mark.parametrize("op", OPS, ids=str)
def test_shards_put_together_are_the_whole(op: Any) -> None:
    with_rule = sharded = 0
    examples = SHARE[op]

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=not LONG,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal with_rule, sharded
        draw = Draw(data)
        call = SAMPLERS[op].call(draw, op)
        rule = rule_for(call)
        if rule is not None:
            with_rule += 1
            candidates = refined(draw, rule)
            for size in (2, 3):
                found = check_rule(
                    call,
                    rule,
                    size,
                    candidates=candidates,
                    constant=SAMPLERS[op].constant,
                    uninitialized=SAMPLERS[op].uninitialized,
                    seed=draw.count(0, 99),
                )
                sharded += sum(strategy.factor is not None for strategy in found)

    check()
    assert with_rule > examples // 3, "most samples have no rule"
    assert (sharded == 0) == (op in NEVER_SHARDED)
