"""Which strategies each call of a set of blocks has over one axis.

Placements spread along the graph until nothing new turns up: a fused weight's segments are found
at the split that takes its result apart, and travel back to the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from msc.ir.placement import EVEN, PARTIAL, REPLICATED, VARYING, Shard, Split, State
from msc.ir.structure import Structure, output_nodes
from msc.ir.values import tensors_of
from msc.passes.sharding.axes import Axis, local_runs
from msc.passes.sharding.calls import (
    Value,
    canonical,
    differentiable,
    is_call,
    operands_of,
    rule_of,
    value_of,
)
from msc.passes.sharding.rule import (
    Strategy,
    factor_of,
    factors,
    shard_factor,
    strategies,
)

_ROUNDS = 12


@dataclass
class Candidates:
    """Strategies of every call, and the shard placements that each placeholder may have.

    allowed: the only states that a placeholder may have, where pins or a plan say so.
    loss: the states in which the loss may end.
    """

    strategies: dict[fx.Node, list[Strategy]] = field(default_factory=dict)
    placeholders: dict[fx.Node, list[Shard]] = field(default_factory=dict)
    allowed: dict[fx.Node, frozenset[State]] = field(default_factory=dict)
    loss: tuple[State, ...] = (REPLICATED, PARTIAL)

    def states(self, node: fx.Node) -> list[State]:
        """The states that a placeholder may have, pins and plan left aside."""
        found = [REPLICATED]
        if node.meta["kind"] in ("parameter", "value"):
            if node.meta.get("differentiable"):
                found += [VARYING] if node.meta["kind"] == "parameter" else [VARYING, PARTIAL]
            found += [State(p, p) for p in self.placeholders[node]]
        return found

    def choices(self, node: fx.Node) -> list[State]:
        """The states among which the search chooses that of a placeholder."""
        allowed = self.allowed.get(node)
        return [s for s in self.states(node) if allowed is None or s in allowed]


def find_candidates(
    structure: Structure,
    axis: Axis,
    outer_axes: tuple[Axis, ...],
    outer: Mapping[str, Mapping[fx.Node, tuple[Strategy, ...]]],
    outer_values: Mapping[str, Mapping[Value, tuple[State, ...]]],
) -> Candidates:
    """All strategies over `axis`, given those over the axes before it, of each distinct block."""
    finder = _Finder(structure, axis, outer_axes, outer, outer_values)
    finder.run()
    return finder.result()


class _Finder:
    def __init__(
        self,
        structure: Structure,
        axis: Axis,
        outer_axes: tuple[Axis, ...],
        outer: Mapping[str, Mapping[fx.Node, tuple[Strategy, ...]]],
        outer_values: Mapping[str, Mapping[Value, tuple[State, ...]]],
    ) -> None:
        self.structure = structure
        self.axis = axis
        self.axes = (*outer_axes, axis)
        self.values = outer_values
        self.named: dict[fx.Node, dict[tuple[str, Split], Strategy | None]] = {}
        self.shards: dict[Value, dict[Shard, None]] = {}
        self.block_of = {
            node: name for name, gm in structure.blocks.items() for node in gm.graph.nodes
        }
        self.tied = self._ties()

    def _ties(self) -> dict[Value, list[Value]]:
        """Values of different blocks that are one: a block's output and the next one's input."""
        ties: dict[Value, dict[Value, None]] = {}
        slots: dict[str, Value] = {}
        for instance in self.structure.instances:
            gm = self.structure.blocks[instance.block]
            nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
            for node, source in zip(nodes, instance.sources, strict=True):
                other: Value | None = None
                if source.kind == "block":
                    producer = self.structure.instances[source.instance]
                    outputs = output_nodes(self.structure.blocks[producer.block])
                    other = value_of(outputs[source.output])
                elif source.kind == "parameter":
                    other = slots.setdefault(source.name, (node, 0))
                if other is not None and other != (node, 0):
                    ties.setdefault((node, 0), {})[other] = None
                    ties.setdefault(other, {})[(node, 0)] = None
        return {value: list(others) for value, others in ties.items()}

    def run(self) -> None:
        for gm in self.structure.blocks.values():
            for node in gm.graph.nodes:
                if is_call(node):
                    rule = rule_of(node)
                    self.named[node] = {}
                    for factor in factors(rule) if rule is not None else ():
                        self._add(node, factor, EVEN)
        for _ in range(_ROUNDS):
            if not self._spread():
                return

    def _add(self, node: fx.Node, factor: str, split: Split) -> bool:
        """Try a strategy; record the placements that it gives its operands and results."""
        if (factor, split) in self.named[node]:
            return False
        rule = rule_of(node)
        assert rule is not None
        strategy = shard_factor(rule, factor, split, self.axis.size, uneven=True)
        if strategy is not None and not self._fits(node, strategy):
            strategy = None
        self.named[node][factor, split] = strategy
        if strategy is None:
            return False
        states = zip(operands_of(node), strategy.operands, strict=True)
        own = (((node, i), state) for i, state in enumerate(strategy.results))
        for value, state in (*states, *own):
            if isinstance(state.value, Shard):
                self._record(value, state.value)
        return True

    def _record(self, value: Value, placement: Shard) -> None:
        found = self.shards.setdefault(value, {})
        if placement not in found:
            found[placement] = None
            for other in self.tied.get(value, ()):
                self._record(other, placement)

    def _fits(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether what the axes before left can be split as the strategy asks."""
        states = zip(operands_of(node), strategy.operands, strict=True)
        own = (((node, i), state) for i, state in enumerate(strategy.results))
        values = self.values[self.block_of[node]]
        for value, state in (*states, *own):
            if not isinstance(state.value, Shard):
                continue
            before = values[value]
            dim = state.value.dim
            shape = tensors_of(value[0])[value[1]].shape
            runs = local_runs(shape[dim], len(before), (*before, state), self.axes, dim)
            if runs is None or 0 in runs:
                return False
        return True

    def _spread(self) -> bool:
        changed = False
        for gm in self.structure.blocks.values():
            for node in gm.graph.nodes:
                rule = rule_of(node) if is_call(node) else None
                if rule is None:
                    continue
                sides = [
                    *zip(operands_of(node), rule.operands, strict=True),
                    *(((node, i), dims) for i, dims in enumerate(rule.results)),
                ]
                for value, dims in sides:
                    for placement in list(self.shards.get(value, ())):
                        named = factor_of(dims, placement)
                        if named is not None:
                            changed |= self._add(node, *named)
        return changed

    def result(self) -> Candidates:
        found = Candidates()
        for gm in self.structure.blocks.values():
            for node in gm.graph.nodes:
                if node.op == "placeholder":
                    found.placeholders[node] = list(self.shards.get((node, 0), ()))
                elif is_call(node):
                    found.strategies[node] = self._strategies(node)
        return found

    def _strategies(self, node: fx.Node) -> list[Strategy]:
        operands = operands_of(node)
        base = strategies(rule_of(node), len(operands), len(tensors_of(node)), self.axis.size, ())
        base = [s for s in base if s.factor is None]
        listed = [*base, *filter(None, self.named[node].values())]
        return _distinct(self._canonical(node, operands, s) for s in listed)

    def _canonical(self, node: fx.Node, operands: list[Value], strategy: Strategy) -> Strategy:
        results = tuple(
            canonical(state, _result_differentiable(node, i))
            for i, state in enumerate(strategy.results)
        )
        wanted = tuple(
            canonical(state, value_differentiable(value))
            for value, state in zip(operands, strategy.operands, strict=True)
        )
        return replace(strategy, operands=wanted, results=results)


def _distinct(items: Iterable[Strategy]) -> list[Strategy]:
    seen: dict[tuple[tuple[State, ...], tuple[State, ...]], Strategy] = {}
    for item in items:
        seen.setdefault((item.operands, item.results), item)
    return list(seen.values())


def _result_differentiable(node: fx.Node, index: int) -> bool:
    return value_differentiable((node, index))


def value_differentiable(value: Value) -> bool:
    """Whether one of a call's results has a gradient."""
    node, index = value
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return differentiable(value)
    count = len(tensors_of(node))
    return any(
        bool(user.meta.get("differentiable")) and user.args[1] % count == index
        for user in node.users
        if user.op == "call_function" and len(user.args) == 2 and isinstance(user.args[1], int)
    )
