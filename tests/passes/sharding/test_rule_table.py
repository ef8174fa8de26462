"""The strategies that the table gives for the calls that matter most, in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from msc.passes.sharding.rule import strategies
from msc.passes.sharding.rules import rule_for
from msc.testing.shards import call_of

aten = torch.ops.aten
msc_ops = torch.ops.msc


def described(target: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The strategies over two ranks, beyond those of any rule."""
    call = call_of(target, *args, **kwargs)
    found = strategies(rule_for(call), len(call.operands), len(call.results), 2)
    return [str(strategy) for strategy in found[2:]]


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def test_the_strategies_of_a_linear_layer() -> None:
    assert described(msc_ops.linear.default, normal(2, 4, 8), normal(6, 8)) == [
        "-: P, R~ -> P",
        "-: R~, P -> P",
        "e_1: S0, R~ -> S0",
        "e_0: S1, R~ -> S1",
        "k: S2, S1 -> P",
        "n: R~, S0 -> S2",
    ]


def test_a_bias_keeps_the_contraction_whole() -> None:
    assert described(msc_ops.linear.default, normal(4, 8), normal(8, 6), normal(6), True) == [
        "-: P, R~, P -> P",
        "-: R~, P, P -> P",
        "e_0: S0, R~, R~ -> S0",
        "n: R~, S1, S0 -> S1",
    ]


def test_the_strategies_of_a_sharded_vocabulary() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert "v: R~, S0 -> P" in described(msc_ops.embedding.default, ids, normal(6, 8))
    assert "v: S2, R~ -> Plogsumexp, P" in described(
        msc_ops.nll_terms.default, normal(2, 4, 8), ids
    )


def test_query_heads_follow_their_key_heads() -> None:
    q, k, v = normal(2, 8, 6, 4), normal(2, 2, 6, 4), normal(2, 2, 6, 4)
    assert described(msc_ops.attention.default, q, k, v, None, 1.0, True) == [
        "b: S0, S0, S0 -> S0, S0",
        "g: S1, S1, S1 -> S1, S1",
        "r: S1/2, R~, R~ -> S1/2, S1/2",  # a part of each group's queries, and all keys
    ]
    assert described(msc_ops.attention.default, q, k[:, :1], v[:, :1], None, 1.0, True) == [
        "b: S0, S0, S0 -> S0, S0",
        "r: S1, R~, R~ -> S1, S1",
    ]


def test_a_fused_weight_is_sharded_by_segments() -> None:
    equal = described(aten.split.Tensor, normal(2, 12), 4, 1)
    assert equal[2] == "rest: S1/3 -> S1, S1, S1"
    unequal = described(aten.split_with_sizes.default, normal(2, 12), [8, 2, 2], 1)
    assert unequal[2] == "rest: S1/8+2+2 -> S1, S1, S1"
    assert described(aten.cat.default, [normal(2, 4), normal(2, 2)], 1)[2] == (
        "rest: S1, S1 -> S1/4+2"
    )


def test_adding_a_number_is_not_linear() -> None:
    assert described(aten.add.Tensor, normal(4), 1.0) == ["e_0: S0 -> S0"]
    assert described(aten.add.Tensor, normal(4), normal(4))[0] == "-: P, P -> P"
    assert described(aten.mul.Tensor, normal(4), 2.0)[0] == "-: P -> P"


def test_integers_are_never_partial_operands() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    assert described(aten.add.Tensor, ids, ids) == ["e_0: S0, S0 -> S0"]


def test_an_op_without_rule_has_none() -> None:
    assert rule_for(call_of(aten.bernoulli.default, torch.ones(4))) is None
    assert rule_for(call_of(aten.dropout.default, torch.ones(4), 0.5, True)) is None
    assert rule_for(call_of(aten.index.Tensor, torch.ones(4), [torch.ones(4).bool()])) is None


def test_a_call_may_hold_anything_in_place_of_its_tensors() -> None:
    """As in a graph, where nodes stand for them."""
    call = call_of(aten.cat.default, [normal(4, 2), normal(4, 4)], 1)
    in_graph = replace(call, args=([object(), object()], 1))
    assert rule_for(in_graph) == rule_for(call)
