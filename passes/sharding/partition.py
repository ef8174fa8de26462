"""Make a graph rank-local: local shapes, localized arguments, explicit collectives.

    %mm: f32[8,16] = msc.linear(%x, %w)      ->   %x_1: f32[8,8] = msc.all_gather(%x, ..., 'tp')
    (w is sharded by rows over tp)                %mm: f32[8,8]{tp:S1} = msc.linear(%x_1, %w)

Every call has a strategy per mesh axis; where a value's state differs from what a call needs, the
conversion between the two is inserted, once for all calls that need the same. Conversions are
autograd-aware, so the gradients' collectives come out of differentiation.
Numerics: sums over a sharded factor change their order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from msc.ir.errors import PlanError, VerifyError
from msc.ir.placement import Partial, Shard
from msc.ir.structure import output_nodes
from msc.ir.values import describe, tensors_of
from msc.passes.sharding.axes import Axis, States, local_shape
from msc.passes.sharding.calls import (
    Value,
    differentiable,
    is_call,
    operands_of,
    rule_of,
    value_of,
)
from msc.passes.sharding.conversions import Converter
from msc.passes.sharding.graph_call import GraphCall
from msc.passes.sharding.local_graph import LocalGraph
from msc.passes.sharding.rule import Strategy, factor_of, shard_factor
from msc.passes.sharding.rules.custom import custom_rule


@dataclass
class Plan:
    """What to do on each axis: strategies of calls, states of placeholders and outputs.

    An output's state of None keeps the one that it is computed in.
    """

    axes: tuple[Axis, ...]
    strategies: dict[fx.Node, tuple[Strategy, ...]] = field(default_factory=dict)
    placeholders: dict[fx.Node, States] = field(default_factory=dict)
    outputs: list[States | None] = field(default_factory=list)


@dataclass
class Partitioned:
    """A rank-local graph, the states of its outputs, and the coordinates that it reads."""

    gm: fx.GraphModule
    output_states: list[States]
    coordinates: list[str]


def partition(gm: fx.GraphModule, plan: Plan, fake_mode: Any) -> Partitioned:
    """Build the rank-local graph that carries out `plan`."""
    return _Partitioner(gm, plan, fake_mode).run()


class _Partitioner:
    def __init__(self, gm: fx.GraphModule, plan: Plan, fake_mode: Any) -> None:
        self.gm = gm
        self.plan = plan
        self.axes = plan.axes
        self.local = LocalGraph(plan.axes, fake_mode)
        self.values = Converter(self.local, _has_gradient)

    def run(self) -> Partitioned:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                states = self.plan.placeholders[node]
                self.values.record((node, 0), states, self.local.placeholder(node, states))
            elif is_call(node):
                self._emit(node, self.plan.strategies[node])
        outputs, states_of_outputs = [], []
        wanted = self.plan.outputs or [None] * len(output_nodes(self.gm))
        for node, want in zip(output_nodes(self.gm), wanted, strict=True):
            value = value_of(node)
            state = self.values.natural[value] if want is None else want
            outputs.append(self._fetch(value, state))
            states_of_outputs.append(state)
        gm = self.local.finish(outputs)
        return Partitioned(gm, states_of_outputs, list(self.local.coordinates))

    def _emit(self, node: fx.Node, chosen: tuple[Strategy, ...]) -> None:
        operands = operands_of(node)
        fetched = [
            self._fetch(operand, tuple(strategy.operands[i] for strategy in chosen))
            for i, operand in enumerate(operands)
        ]
        results = tensors_of(node)
        states = [tuple(strategy.results[i] for strategy in chosen) for i in range(len(results))]
        shapes = tuple(
            local_shape(result.shape, state, self.axes)
            for result, state in zip(results, states, strict=True)
        )
        supply = iter(fetched)
        args, kwargs = pytree.tree_map(
            lambda leaf: next(supply) if isinstance(leaf, fx.Node) else leaf,
            (node.args, dict(node.kwargs)),
        )
        target = node.target
        rule = rule_of(node)
        if rule is not None and rule.localize is not None and any(s.factor for s in chosen):
            call = GraphCall(self.local, node, chosen, args, kwargs, fetched, shapes)
            target, args, kwargs = rule.localize(call)
        try:
            new = self.local.call(target, *args, source=node, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise self._does_not_run(node, error) from error
        self._check_shapes(node, new, shapes)
        self._results(node, new, states)

    def _does_not_run(self, node: fx.Node, error: Exception) -> Exception:
        """A call that fails on the shards that its rule gives it."""
        ways = ", ".join(str(strategy) for strategy in self.plan.strategies[node])
        reason = str(error).partition("\n")[0]
        custom = custom_rule(node.target)
        if custom is None:
            return VerifyError(
                f"partition: {node.target} does not run on shards ({ways}): {reason}\n"
                "This is a bug in its sharding rule."
            )
        return PlanError(
            f"The sharding rule '{custom.notation}' of {custom.op} is wrong: the op does not run "
            f"on shards of {ways}: {reason} Dims that must have one length have one letter; "
            "msc.testing.check_sharding_rule finds out."
        )

    def _results(self, node: fx.Node, new: fx.Node, states: list[States]) -> None:
        if isinstance(node.meta["val"], torch.Tensor):
            self.local.describe(new, states[0], differentiable((node, 0)))
            self.values.record((node, 0), states[0], new)
            return
        grads = {user.args[1]: bool(user.meta.get("differentiable")) for user in node.users}
        for index, state in enumerate(states):
            if index not in grads and index - len(states) not in grads:
                self.values.natural.setdefault((node, index), state)
                continue
            item = self.local.call(operator.getitem, new, index, source=node)
            has_gradient = grads.get(index, grads.get(index - len(states), False))
            self.local.describe(item, state, has_gradient)
            self.values.record((node, index), state, item)

    def _check_shapes(
        self, node: fx.Node, new: fx.Node, shapes: tuple[tuple[int, ...], ...]
    ) -> None:
        found = tuple(tuple(value.shape) for value in tensors_of(new))
        if found != shapes:
            raise VerifyError(
                f"partition: the rule of {node.target} expects local results {shapes}, "
                f"but the op yields {found}.\n  %{node.name}: {describe(node.meta['val'])}, "
                f"strategies {[str(s) for s in self.plan.strategies[node]]}\n"
                "This is a bug in the rule's `localize`."
            )

    def _fetch(self, value: Value, wanted: States) -> fx.Node:
        """The node that holds `value` in the wanted states, converting it if there is none yet."""
        has_gradient = _has_gradient(value)
        if not has_gradient:
            # the gradient's placement means nothing then: take what is there
            current = self.values.natural[value]
            wanted = tuple(
                c if c.value == w.value else w for c, w in zip(current, wanted, strict=True)
            )
        found = self.values.find(value, wanted)
        if found is None and not has_gradient:
            found = self._sharded_copy(value, wanted)
        return self.values.convert(value, wanted) if found is None else found

    def _sharded_copy(self, value: Value, wanted: States) -> fx.Node | None:
        """Compute a constant's shard rather than slice the whole: a mask of the local batch."""
        node, index = value
        if not is_call(node) or index:
            return None
        current = self.values.natural[value]
        chosen = list(self.plan.strategies[node])
        rule = rule_of(node)
        for i, (have, want) in enumerate(zip(current, wanted, strict=True)):
            if have == want:
                continue
            if not isinstance(want.value, Shard) or isinstance(have.value, (Shard, Partial)):
                return None
            named = None if rule is None else factor_of(rule.results[0], want.value)
            if rule is None or named is None:
                return None
            strategy = shard_factor(rule, *named, self.axes[i].size, uneven=True)
            if strategy is None or strategy.results[0].value != want.value:
                return None
            chosen[i] = strategy
        self._emit(node, tuple(chosen))
        return self.values.find(value, wanted)


def _has_gradient(value: Value) -> bool:
    """Whether a gradient flows to a result of a call that some reader picks."""
    node, _ = value
    if isinstance(node.meta["val"], torch.Tensor):
        return differentiable(value)
    return any(
        user.meta.get("differentiable", False)
        for user in node.users
        if user.target is operator.getitem and value_of(user) == value
    )
