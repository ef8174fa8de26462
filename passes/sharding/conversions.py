"""Conversions between states: the collectives, and the local ops, that turn one into another.

S -> R~  all-gather, its gradient reduce-scattered      P -> S   reduce-scatter, gathered
S -> R   all-gather, its gradient sliced                P -> R   all-reduce, identity
R -> R~  identity, all-reduced                          R -> S   slice, gathered
R~ -> P  divided by the number of ranks                 R~ -> S  slice, padded

Shards of unequal length are padded to the longest before they travel, and cut afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from msc.ir.errors import VerifyError
from msc.ir.placement import PARTIAL, REPLICATED, VARYING, Partial, Shard, State
from msc.ir.values import tensors_of
from msc.passes.sharding.axes import States, local_runs, runs_left, with_state
from msc.passes.sharding.calls import Value
from msc.passes.sharding.local_graph import LocalGraph

msc_ops = torch.ops.msc
aten = torch.ops.aten


class Converter:
    """Holds the nodes of each value in all states so far, and makes those that are missing.

    natural: the states in which a value is computed.
    """

    def __init__(self, local: LocalGraph, has_gradient: Callable[[Value], bool]) -> None:
        self.local = local
        self.natural: dict[Value, States] = {}
        self._variants: dict[Value, dict[States, fx.Node]] = {}
        self._has_gradient = has_gradient

    def record(self, value: Value, states: States, node: fx.Node) -> None:
        """Note that `node` holds `value` in `states`, which at first are its natural ones."""
        self.natural.setdefault(value, states)
        self._variants.setdefault(value, {})[states] = node

    def find(self, value: Value, states: States) -> fx.Node | None:
        """The node that holds `value` in `states`, if there is one."""
        return self._variants.get(value, {}).get(states)

    def convert(self, value: Value, wanted: States) -> fx.Node:
        """The node that holds `value` in `wanted`, one axis after the other."""
        current = self.natural[value]
        for index, state in conversion_steps(current, wanted):
            target = with_state(current, index, state)
            have, want = self.natural[value][index], wanted[index]
            axis = self.local.axes[index].name
            self.local.conversion = (value[0].name, value[1], axis, str(have), str(want))
            self._reach(value, current, target, index)
            current = target
        self.local.conversion = None
        return self._variants[value][current]

    def _reach(self, value: Value, current: States, target: States, index: int) -> None:
        if target not in self._variants[value]:
            node = self._convert(value, current, target, index)
            self.local.describe(node, target, self._has_gradient(value))
            self._variants[value][target] = node

    def _through(self, value: Value, current: States, target: States, index: int) -> fx.Node:
        """Convert by way of the whole value."""
        middle = with_state(current, index, VARYING)
        self._reach(value, current, middle, index)
        return self._convert(value, middle, target, index)

    def _convert(self, value: Value, current: States, target: States, index: int) -> fx.Node:
        """Convert over one axis."""
        have, want = current[index], target[index]
        if _needs_whole(have, want, self._has_gradient(value)):
            return self._through(value, current, target, index)
        node = self._variants[value][current]
        axis = self.local.axes[index]
        over, source = (axis.name, axis.size), value[0]
        if isinstance(want.value, Shard):
            return self._to_shard(value, current, target, index)
        if isinstance(have.value, Shard) and want in (REPLICATED, VARYING):
            dim, parts = have.value.dim, self._parts(value, current, index)
            node = self._repad(node, dim, parts.local, parts.equal, source)
            grad = "reduce_scatter" if want == VARYING else "shard"
            extra = (self.local.coordinate(axis.name),) if grad == "shard" else ()
            op = msc_ops.all_gather.default
            node = self.local.call(op, node, dim, parts.equal, *over, grad, *extra, source=source)
            return self._repad(node, dim, parts.all_equal, parts.all_parts, source)
        if isinstance(have.value, Partial) and want in (REPLICATED, VARYING):
            reduce = have.value.op
            if reduce == "max" and self._has_gradient(value):
                raise VerifyError(
                    f"partition: %{source.name} is a maximum over '{axis.name}' that needs a "
                    "gradient, but its reduction has none. This is a bug in the placement pass."
                )
            grad = "identity" if want == REPLICATED else "all_reduce"
            op = msc_ops.all_reduce.default
            return self.local.call(op, node, reduce, *over, grad, source=source)
        if have == REPLICATED and want == VARYING:
            return self.local.call(msc_ops.grad_reduce.default, node, *over, source=source)
        if want == PARTIAL:
            return self.local.call(aten.div.Tensor, node, axis.size, source=source)
        raise _impossible(source, have, want, axis.name)

    def _to_shard(self, value: Value, current: States, target: States, index: int) -> fx.Node:
        node, source = self._variants[value][current], value[0]
        axis = self.local.axes[index]
        have, want = current[index], target[index].value
        assert isinstance(want, Shard)
        parts = self._parts(value, target, index)
        node = self._repad(node, want.dim, parts.all_parts, parts.all_equal, source)
        args = (node, want.dim, parts.equal, axis.name, axis.size)
        if have == PARTIAL:
            node = self.local.call(msc_ops.reduce_scatter.default, *args, source=source)
        elif have in (REPLICATED, VARYING):
            grad = "all_gather" if have == REPLICATED else "pad"
            coordinate = self.local.coordinate(axis.name)
            node = self.local.call(msc_ops.shard.default, *args, coordinate, grad, source=source)
        else:
            raise _impossible(source, have, target[index], axis.name)
        return self._repad(node, want.dim, parts.equal, parts.local, source)

    def _repad(
        self, node: fx.Node, dim: int, runs: list[int], lengths: list[int], source: fx.Node
    ) -> fx.Node:
        """Parts of unequal length travel padded to equal ones."""
        if runs == lengths:
            return node
        return self.local.call(msc_ops.repad.default, node, dim, runs, lengths, source=source)

    def _parts(self, value: Value, states: States, index: int) -> _Parts:
        placement, axis = states[index].value, self.local.axes[index]
        assert isinstance(placement, Shard)
        length = tensors_of(value[0])[value[1]].shape[placement.dim]
        axes = self.local.axes
        local = local_runs(length, index, states, axes, placement.dim)
        runs = runs_left(length, index, states, axes, placement.dim)
        if local is None or runs is None:
            raise VerifyError(
                f"partition: %{value[0].name} is sharded over {[a.name for a in axes]} as "
                f"{[str(s) for s in states]}, which gives no contiguous runs along dim "
                f"{placement.dim}. This is a bug in the placement pass."
            )
        equal = [placement.part(run, axis.size, 0) for run in runs]
        return _Parts(
            local,
            equal,
            [length for length in equal for _ in range(axis.size)],
            [placement.part(run, axis.size, rank) for run in runs for rank in range(axis.size)],
        )


@dataclass(frozen=True)
class _Parts:
    """Lengths of the parts of a dim's runs: this rank's, and those that all ranks' fit into.

    all_equal, all_parts: of all ranks, run by run.
    """

    local: list[int]
    equal: list[int]
    all_equal: list[int]
    all_parts: list[int]


def _needs_whole(have: State, want: State, gradient: bool) -> bool:
    """Whether the way from `have` to `want` leads over the whole value."""
    if isinstance(want.value, Shard):
        return isinstance(have.value, Shard)
    if want != PARTIAL or have == VARYING:
        return False
    return have != REPLICATED or gradient


def _impossible(source: fx.Node, have: State, want: State, axis: str) -> VerifyError:
    return VerifyError(
        f"partition: no conversion of %{source.name} from {have} to {want} over '{axis}'. "
        "This is a bug in the placement pass."
    )


def conversion_steps(current: States, wanted: States) -> list[tuple[int, State]]:
    """The conversions that lead from `current` to `wanted`, each of one axis.

    An inner axis splits what the outer ones left of a dim. So inner axes are gathered first and
    sharded last, also those that end as they began, if an outer axis changes the same dim.
    """
    changed = [
        i for i, (have, want) in enumerate(zip(current, wanted, strict=True)) if have != want
    ]
    gathers = [i for i in changed if isinstance(current[i].value, Shard)]
    for inner, state in enumerate(current):
        if inner not in changed and isinstance(state.value, Shard):
            outer = [s.value for i in changed if i < inner for s in (current[i], wanted[i])]
            if any(isinstance(o, Shard) and o.dim == state.value.dim for o in outer):
                gathers.append(inner)
    steps: list[tuple[int, State]] = []
    for i in sorted(gathers, reverse=True):
        steps.append((i, VARYING if isinstance(wanted[i].value, Shard) else wanted[i]))
    rest = [i for i in changed if i not in gathers]
    rest += [i for i in gathers if isinstance(wanted[i].value, Shard)]
    return steps + [(i, wanted[i]) for i in sorted(rest)]
