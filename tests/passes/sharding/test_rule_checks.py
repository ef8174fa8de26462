"""The check of the rules finds mistakes: no rule passes because nothing is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from msc.ir.placement import REPLICATED
from msc.passes.sharding.rule import Call, LocalCall, Localized, Rule
from msc.passes.sharding.rules import rule_for
from msc.testing.shards import RuleError, call_of, check_rule

aten = torch.ops.aten
msc_ops = torch.ops.msc


def call_with_rule(target: Any, *args: Any, **kwargs: Any) -> tuple[Call, Rule]:
    call = call_of(target, *args, **kwargs)
    rule = rule_for(call)
    assert rule is not None
    return call, rule


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


QKV = normal(1, 1, 4, 4)


def local_coordinates(local: LocalCall) -> Localized:
    """Dropout that numbers its elements within the rank's part: every rank drops the same."""
    x, p, key, coordinates, _ = local.args
    return local.target, (x, p, key, coordinates, list(local.result_shapes[0])), {}


# Each makes one mistake in a rule; the check has to find all of them.
MISTAKES: dict[str, Callable[[Rule], Rule]] = {
    "reduction": lambda rule: replace(rule, contracted={"d1": "max"}),
    "no scale": lambda rule: replace(rule, localize=None),
    "wrong factor": lambda rule: replace(rule, results=(rule.operands[0][:1],), whole=frozenset()),
    "linear": lambda rule: replace(rule, linear=(frozenset({0}),)),
    "size": lambda rule: replace(rule, localize=None),
    "start": lambda rule: replace(rule, localize=None),
    "coordinates": lambda rule: replace(rule, localize=local_coordinates),
    "whole": lambda rule: replace(rule, whole=frozenset()),
}


def is_faulty(call: Call, rule: Rule, size: int) -> bool:
    """Whether the check finds a fault; the op itself may refuse a wrong size."""
    try:
        check_rule(call, rule, size)
    except (RuleError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize(
    ("mistake", "target", "args"),
    [
        ("reduction", aten.sum.dim_IntList, (normal(4, 6), [1])),
        ("no scale", aten.mean.dim, (normal(4, 6), [1])),
        ("wrong factor", aten.select.int, (normal(6, 6), 0, 0)),
        ("linear", aten.exp.default, (normal(4),)),
        ("linear", aten.add.Tensor, (normal(4), 1.0)),
        ("linear", aten.layer_norm.default, (normal(4, 6), [6])),
        ("size", aten.view.default, (normal(4, 6), [24])),
        ("size", aten.repeat.default, (normal(4, 6), [6, 1])),
        ("size", aten.squeeze.default, (normal(2, 6),)),
        ("start", msc_ops.embedding.default, (torch.zeros(6, dtype=torch.int64), normal(6, 2))),
        ("coordinates", msc_ops.dropout.default, (normal(6), 0.5, torch.tensor(3), [None], [6])),
        ("whole", aten.softmax.int, (normal(6, 6), 0)),
        ("whole", aten.cumsum.default, (normal(6, 6), 0)),
        (
            "whole",
            aten.scaled_dot_product_attention.default,
            (*[QKV] * 3, None, 0.0, True),
        ),
    ],
    ids=lambda value: None if isinstance(value, tuple) else str(value),
)
def test_a_mistake_in_a_rule_is_found(mistake: str, target: Any, args: tuple[Any, ...]) -> None:
    call, rule = call_with_rule(target, *args)
    for size in (2, 3):
        check_rule(call, rule, size)
    wrong = MISTAKES[mistake](rule)
    faults = [size for size in (2, 3) if is_faulty(call, wrong, size)]
    assert faults


def test_a_wrong_gradient_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replicated operand of a sharded call gets a part of its gradient from each rank."""
    call, rule = call_with_rule(msc_ops.linear.default, normal(4, 8), normal(6, 8))
    monkeypatch.setattr("msc.passes.sharding.rule.VARYING", REPLICATED)
    with pytest.raises(RuleError, match="gradient of operand 1"):
        check_rule(call, replace(rule, linear=()), 2)
