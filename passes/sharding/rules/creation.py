"""Ops that make tensors out of sizes: every dim can be sharded if all elements are equal."""

from __future__ import annotations

from typing import Any

from torch import ops

from msc.passes.sharding.rule import Rule
from msc.passes.sharding.rules.binding import Bound, Line, derived, dims_of, with_arguments
from msc.passes.sharding.rules.pointwise import pointwise

aten = ops.aten


def filled(*targets: Any) -> Line:
    """A line for ops of a size whose elements are all equal. An operand only gives the dtype."""

    def build(bound: Bound) -> Rule:
        return bound.rule(
            _unrelated(bound),
            [tuple(dims_of(bound.result_shape()))],
            whole=_unrelated_names(bound),
            localize=lambda local: with_arguments(local, size=list(local.result_shapes[0])),
        )

    return derived(build, *targets)


def whole(*targets: Any) -> Line:
    """A line for ops whose elements differ: each rank computes all of them."""

    def build(bound: Bound) -> Rule:
        dims = dims_of(bound.result_shape())
        return bound.rule({}, [tuple(dims)], whole=[f"d{d}" for d in range(len(dims))])

    return derived(build, *targets)


def _unrelated(bound: Bound) -> dict[str, Any]:
    if not bound.positions.get("self"):
        return {}
    return {"self": tuple(dims_of(bound.shape("self"), "unread"))}


def _unrelated_names(bound: Bound) -> list[str]:
    rank = len(bound.shape("self")) if bound.positions.get("self") else 0
    return [f"unread{d}" for d in range(rank)]


CREATION = [
    filled(aten.zeros, aten.ones, aten.full, aten.empty.memory_format),
    filled(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
    pointwise(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    whole(aten.arange, aten.arange.start, aten.arange.start_step, aten.linspace, aten.eye),
    whole(aten.scalar_tensor),
]
