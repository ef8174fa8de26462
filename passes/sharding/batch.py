"""Shard the batch: propagate the inputs' batch placement through a graph, over dp and mb at once.

Nothing is chosen here. A value that depends on the batch is sharded like its operands, what sums
over the batch is partial, everything else is replicated, and its gradient is partial: each rank
and micro-batch contributes a part, reduced once per step.

What needs a collective (a partial count as a divisor) is a *conflict*. Over mb no collective
exists, so a value without parameters among its ancestors is hoisted: computed once per step from
all of a rank's rows. Any other conflict makes the model not separable over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from msc.ir.placement import PARTIAL, VARYING, Partial, Shard, State
from msc.ir.structure import output_nodes
from msc.passes.sharding.calls import (
    Value,
    differentiable,
    is_call,
    operands_of,
    rule_of,
    value_of,
)
from msc.passes.sharding.rule import Rule, Strategy, factor_of, shard_factor, strategies

Conflict = Callable[[fx.Node, Value], bool]
"""Called with a call and an operand that it needs whole. True: it will be; False: it cannot be."""


class NotSeparableError(Exception):
    """A call combines values of different samples in a way that is no sum."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass
class BatchPlan:
    """States over the batch of one graph's values; `strategies` of its calls."""

    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    states: dict[Value, State] = field(default_factory=dict)

    def outputs(self, gm: fx.GraphModule) -> list[State]:
        """States of the graph's outputs, in order."""
        return [self.states[value_of(node)] for node in output_nodes(gm)]


def propagate_batch(
    gm: fx.GraphModule,
    size: int,
    inputs: Mapping[fx.Node, State],
    whole: Conflict,
) -> BatchPlan:
    """Find the states of all values of a graph from those of its placeholders.

    `size` is the number of parts of the batch. `whole` decides about conflicts; when it declines,
    `NotSeparableError` says which call combines samples.
    """
    plan = BatchPlan()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            plan.states[node, 0] = inputs.get(node, VARYING)
        elif is_call(node):
            strategy = _choose(node, size, plan.states, whole)
            plan.strategies[node] = strategy
            for index, state in enumerate(strategy.results):
                plan.states[node, index] = state
    return plan


def _choose(node: fx.Node, size: int, states: Mapping[Value, State], whole: Conflict) -> Strategy:
    operands = operands_of(node)
    rule = rule_of(node)
    num_results = max(1, len(_results(node)))
    seen = {operand: states[operand] for operand in operands}  # as this call will read them
    while True:
        current = [seen[operand] for operand in operands]
        if all(state == VARYING for state in current):
            return strategies(None, len(operands), num_results, size)[1]
        found = _sharded(rule, current, size) if rule is not None else None
        if found is not None and not _loses_gradient(node, found):
            return found
        if not _make_whole(node, seen, whole):
            reason = "combines samples of the batch"
            if rule is None:
                reason = "has no sharding rule, so that it may combine samples of the batch"
            raise NotSeparableError(node, reason)


def _results(node: fx.Node) -> tuple[object, ...]:
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _sharded(rule: Rule, current: list[State], size: int) -> Strategy | None:
    """The strategy that fits operands of which some are sharded or partial; None if none does."""
    partial = {i for i, state in enumerate(current) if isinstance(state.value, Partial)}
    shards = {i: s.value for i, s in enumerate(current) if isinstance(s.value, Shard)}
    if partial:
        if shards or any(current[i] != PARTIAL for i in partial):
            return None
        for group in rule.linear:
            if partial <= group:
                operands = tuple(PARTIAL if i in group else VARYING for i in range(len(current)))
                return Strategy(operands, (PARTIAL,) * len(rule.results))
        return None
    factors = {factor_of(rule.operands[i], placement) for i, placement in shards.items()}
    if len(factors) != 1:
        return None
    (named,) = factors
    return None if named is None else shard_factor(rule, *named, size)


def _loses_gradient(node: fx.Node, strategy: Strategy) -> bool:
    """Whether a result would be a maximum over the ranks, whose reduction has no gradient."""
    return any(
        isinstance(state.value, Partial) and state.value.op == "max" and differentiable((node, i))
        for i, state in enumerate(strategy.results)
    )


def _make_whole(node: fx.Node, seen: dict[Value, State], whole: Conflict) -> bool:
    """Make one operand whole: a partial count before a partial loss, shards last."""

    def rank(operand: Value) -> tuple[bool, bool]:
        return isinstance(seen[operand].value, Shard), differentiable(operand)

    for operand in sorted(seen, key=rank):
        if seen[operand] != VARYING and whole(node, operand):
            seen[operand] = VARYING
            return True
    return False
