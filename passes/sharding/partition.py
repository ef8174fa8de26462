"""Make a graph rank-local: local shapes, localized arguments, explicit collectives.

    %mm: f32[8,16] = msc.linear(%x, %w)      ->   %x_1: f32[8,8] = msc.all_gather(%x, ..., 'tp')
    (w is sharded by rows over tp)                %mm: f32[8,8]{tp:S1} = msc.linear(%x_1, %w)

Every call has a strategy per mesh axis; where a value's state differs from what a call needs, the
conversion between the two is inserted, once for all calls that need the same. Conversions are
autograd-aware, so the gradients' collectives come out of differentiation.
Numerics: sums over a sharded factor change their order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from msc.ir.errors import VerifyError
from msc.ir.placement import (
    PARTIAL,
    REPLICATED,
    VARYING,
    Partial,
    Placement,
    Shard,
    State,
)
from msc.ir.structure import output_nodes
from msc.ir.torch_private import OpOverload
from msc.ir.values import carry, describe, tensors_of
from msc.passes.sharding.calls import (
    Value,
    differentiable,
    is_call,
    operands_of,
    rule_of,
    value_of,
)
from msc.passes.sharding.rule import LocalCall, Strategy, factor_of, shard_factor

msc_ops = torch.ops.msc
aten = torch.ops.aten

States = tuple[State, ...]
"""One state per axis, in the order of the axes."""


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or the micro-batch axis, that shards."""

    name: str
    size: int


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


def local_runs(
    length: int, axis: int, states: States, axes: Sequence[Axis], dim: int
) -> list[int] | None:
    """Local lengths of the runs of `dim` that `axes[axis]` shards, after the axes before it.

    None where an earlier axis splits the dim finer than this one: the runs are not contiguous.
    """
    placement = states[axis].value
    assert isinstance(placement, Shard)
    runs = list(placement.run_lengths(length))
    for outer in range(axis):
        other = states[outer].value
        if not isinstance(other, Shard) or other.dim != dim:
            continue
        if not isinstance(other.segments, int) or not isinstance(placement.segments, int):
            return None
        if len(runs) % (other.segments * axes[outer].size):
            if other.segments != placement.segments or other.segments != 1:
                return None
            runs = [run // axes[outer].size for run in runs]
            continue
        runs = runs[: len(runs) // axes[outer].size]
    return [run // axes[axis].size for run in runs]


def local_shape(shape: Sequence[int], states: States, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The shape of a rank's part of a value of global `shape`."""
    local = list(shape)
    for state, axis in zip(states, axes, strict=True):
        if isinstance(state.value, Shard):
            local[state.value.dim] //= axis.size
    return tuple(local)


def partition(gm: fx.GraphModule, plan: Plan, fake_mode: Any) -> Partitioned:
    """Build the rank-local graph that carries out `plan`."""
    return _Partitioner(gm, plan, fake_mode).run()


class _Partitioner:
    def __init__(self, gm: fx.GraphModule, plan: Plan, fake_mode: Any) -> None:
        self.gm = gm
        self.plan = plan
        self.axes = plan.axes
        self.fake_mode = fake_mode
        self.graph = fx.Graph()
        self.variants: dict[Value, dict[States, fx.Node]] = {}
        self.natural: dict[Value, States] = {}
        self.coordinates: dict[str, fx.Node] = {}
        self.last_placeholder: fx.Node | None = None

    def run(self) -> Partitioned:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif is_call(node):
                self._emit(node, self.plan.strategies[node])
        outputs, states = [], []
        wanted = self.plan.outputs or [None] * len(output_nodes(self.gm))
        for node, want in zip(output_nodes(self.gm), wanted, strict=True):
            value = value_of(node)
            state = self.natural[value] if want is None else want
            outputs.append(self._fetch(value, state))
            states.append(state)
        self.graph.output(tuple(outputs))
        gm = fx.GraphModule({}, self.graph)
        gm.graph.eliminate_dead_code()
        names = [name for name, node in self.coordinates.items() if node.users]
        for node in self.coordinates.values():
            if not node.users:
                gm.graph.erase_node(node)
        gm.recompile()
        return Partitioned(gm, states, names)

    # -- nodes of the new graph

    def _placeholder(self, node: fx.Node) -> None:
        states = self.plan.placeholders[node]
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        value = node.meta["val"]
        shape = local_shape(value.shape, states, self.axes)
        with self.fake_mode:
            new.meta["val"] = torch.empty(shape, dtype=value.dtype)
        self._type(new, states, bool(node.meta.get("differentiable")))
        self._record((node, 0), states, new)
        self.last_placeholder = new

    def coordinate(self, axis: str) -> fx.Node:
        """The rank's coordinate on an axis: a placeholder, made when it is first needed."""
        if axis not in self.coordinates:
            anchor = self.last_placeholder
            where = self.graph.inserting_after(anchor) if anchor is not None else None
            if where is None:
                where = self.graph.inserting_before(next(iter(self.graph.nodes)))
            with where:
                node = self.graph.placeholder(f"coordinate_{axis}")
            with self.fake_mode:
                node.meta["val"] = torch.empty((), dtype=torch.int64)
            node.meta.update(kind="coordinate", name=axis, differentiable=False)
            self.coordinates[axis] = node
            self.last_placeholder = node
        return self.coordinates[axis]

    def call(self, target: Any, *args: Any, source: fx.Node, **kwargs: Any) -> fx.Node:
        """Append a call; its value comes from running it on fake tensors.

        A rule may localize to a plain function of several ops: its ops are appended one by one.
        """
        if not isinstance(target, OpOverload) and target is not operator.getitem:
            return self._inlined(target, args, kwargs, source)
        node = self.graph.call_function(target, args, kwargs)
        self._run_fake(node)
        return carry(source, node)

    def _run_fake(self, node: fx.Node) -> None:
        with self.fake_mode:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    def _inlined(self, function: Any, args: Any, kwargs: Any, source: fx.Node) -> fx.Node:
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        before = set(self.graph.nodes)

        def proxy(node: fx.Node) -> Any:
            return fx.Proxy(node, tracer)

        proxies: Any = fx.map_arg((args, kwargs), proxy)
        result = function(*proxies[0], **proxies[1])
        for node in self.graph.nodes:
            if node not in before:
                self._run_fake(node)
                carry(source, node)
                node.meta.setdefault("differentiable", bool(source.meta.get("differentiable")))
        assert isinstance(result, fx.Proxy)
        return result.node

    def _type(self, node: fx.Node, states: States, has_gradient: bool) -> None:
        placement: dict[str, Placement] = {}
        gradient: dict[str, Placement] = {}
        for axis, state in zip(self.axes, states, strict=True):
            if state.value != REPLICATED.value:
                placement[axis.name] = state.value
            if has_gradient and state.grad != REPLICATED.value:
                gradient[axis.name] = state.grad
        node.meta["placement"] = placement
        node.meta["differentiable"] = has_gradient
        if has_gradient:
            node.meta["grad_placement"] = gradient

    def _record(self, value: Value, states: States, node: fx.Node) -> None:
        self.natural.setdefault(value, states)
        self.variants.setdefault(value, {})[states] = node

    # -- calls

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
            call = _GraphCall(self, node, chosen, args, kwargs, fetched, shapes)
            target, args, kwargs = rule.localize(call)
        new = self.call(target, *args, source=node, **kwargs)
        self._check_shapes(node, new, shapes)
        self._results(node, new, states)

    def _results(self, node: fx.Node, new: fx.Node, states: list[States]) -> None:
        if isinstance(node.meta["val"], torch.Tensor):
            self._type(new, states[0], differentiable((node, 0)))
            self._record((node, 0), states[0], new)
            return
        grads = {user.args[1]: bool(user.meta.get("differentiable")) for user in node.users}
        for index, state in enumerate(states):
            if index not in grads and index - len(states) not in grads:
                self.natural.setdefault((node, index), state)
                continue
            item = self.call(operator.getitem, new, index, source=node)
            has_gradient = grads.get(index, grads.get(index - len(states), False))
            self._type(item, state, has_gradient)
            self._record((node, index), state, item)

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

    # -- conversions

    def _fetch(self, value: Value, wanted: States) -> fx.Node:
        """The node that holds `value` in the wanted states, converting it if there is none yet."""
        has_gradient = self._has_gradient(value)
        current = self.natural[value]
        if not has_gradient:
            # the gradient's placement means nothing then: take what is there
            wanted = tuple(
                c if c.value == w.value else w for c, w in zip(current, wanted, strict=True)
            )
        if wanted in self.variants[value]:
            return self.variants[value][wanted]
        if not has_gradient and (copy := self._sharded_copy(value, wanted)) is not None:
            return copy
        for index, state in _conversion_steps(current, wanted):
            target = _replace(current, index, state)
            if target not in self.variants[value]:
                node = self._convert(value, current, target, index)
                self._type(node, target, has_gradient)
                self.variants[value][target] = node
            current = target
        return self.variants[value][current]

    def _has_gradient(self, value: Value) -> bool:
        node, _ = value
        if isinstance(node.meta["val"], torch.Tensor):
            return differentiable(value)
        return any(
            user.meta.get("differentiable", False)
            for user in node.users
            if user.target is operator.getitem and value_of(user) == value
        )

    def _sharded_copy(self, value: Value, wanted: States) -> fx.Node | None:
        """Compute a constant's shard rather than slice the whole: a mask of the local batch."""
        node, index = value
        if not is_call(node) or index:
            return None
        current = self.natural[value]
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
            strategy = shard_factor(rule, *named, self.axes[i].size)
            if strategy is None or strategy.results[0].value != want.value:
                return None
            chosen[i] = strategy
        self._emit(node, tuple(chosen))
        return self.variants[value].get(wanted)

    def _convert(self, value: Value, current: States, target: States, index: int) -> fx.Node:
        node = self.variants[value][current]
        source = value[0]
        axis = self.axes[index]
        have, want = current[index], target[index]
        shape = tensors_of(source)[value[1]].shape
        name, size = axis.name, axis.size
        if isinstance(have.value, Shard) and isinstance(want.value, Shard):
            middle = _replace(current, index, VARYING)
            if middle not in self.variants[value]:
                self.variants[value][middle] = self._convert(value, current, middle, index)
                self._type(self.variants[value][middle], middle, self._has_gradient(value))
            return self._convert(value, middle, target, index)
        if isinstance(have.value, Shard) and want in (REPLICATED, VARYING):
            runs = self._runs(shape, index, current, value)
            grad = "reduce_scatter" if want == VARYING else "shard"
            extra = (self.coordinate(name),) if grad == "shard" else ()
            return self.call(
                msc_ops.all_gather.default,
                node,
                have.value.dim,
                runs,
                name,
                size,
                grad,
                *extra,
                source=source,
            )
        if isinstance(have.value, Partial) and want in (REPLICATED, VARYING):
            op = have.value.op
            if op == "max" and self._has_gradient(value):
                raise VerifyError(
                    f"partition: %{source.name} is a maximum over '{name}' that needs a gradient, "
                    "but its reduction has none. This is a bug in the placement pass."
                )
            grad = "identity" if want == REPLICATED else "all_reduce"
            return self.call(msc_ops.all_reduce.default, node, op, name, size, grad, source=source)
        if have == PARTIAL and isinstance(want.value, Shard):
            runs = self._runs(shape, index, target, value)
            return self.call(
                msc_ops.reduce_scatter.default,
                node,
                want.value.dim,
                runs,
                name,
                size,
                source=source,
            )
        if have in (REPLICATED, VARYING) and isinstance(want.value, Shard):
            runs = self._runs(shape, index, target, value)
            grad = "all_gather" if have == REPLICATED else "pad"
            return self.call(
                msc_ops.shard.default,
                node,
                want.value.dim,
                runs,
                name,
                size,
                self.coordinate(name),
                grad,
                source=source,
            )
        if have == REPLICATED and want == VARYING:
            return self.call(msc_ops.grad_reduce.default, node, name, size, source=source)
        if have == REPLICATED and want == PARTIAL and self._has_gradient(value):
            middle = _replace(current, index, VARYING)
            if middle not in self.variants[value]:
                self.variants[value][middle] = self._convert(value, current, middle, index)
            return self._convert(value, middle, target, index)
        if want == PARTIAL and have not in (VARYING, REPLICATED):
            middle = _replace(current, index, VARYING)
            if middle not in self.variants[value]:
                self.variants[value][middle] = self._convert(value, current, middle, index)
                self._type(self.variants[value][middle], middle, self._has_gradient(value))
            return self._convert(value, middle, target, index)
        if want == PARTIAL:
            return self.call(aten.div.Tensor, node, size, source=source)
        raise VerifyError(
            f"partition: no conversion of %{source.name} from {have} to {want} over '{name}'. "
            "This is a bug in the placement pass."
        )

    def _runs(self, shape: torch.Size, index: int, states: States, value: Value) -> list[int]:
        placement = states[index].value
        assert isinstance(placement, Shard)
        runs = local_runs(shape[placement.dim], index, states, self.axes, placement.dim)
        if runs is None:
            raise VerifyError(
                f"partition: %{value[0].name} is sharded over {[a.name for a in self.axes]} as "
                f"{[str(s) for s in states]}, which gives no contiguous runs along dim "
                f"{placement.dim}. This is a bug in the placement pass."
            )
        return runs


def _conversion_steps(current: States, wanted: States) -> list[tuple[int, State]]:
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


def _replace(states: States, index: int, state: State) -> States:
    return (*states[:index], state, *states[index + 1 :])


class _GraphCall(LocalCall):
    """A call being localized inside a new graph."""

    def __init__(
        self,
        partitioner: _Partitioner,
        node: fx.Node,
        chosen: tuple[Strategy, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fetched: Sequence[fx.Node],
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        self.partitioner = partitioner
        self.node = node
        self.chosen = chosen
        self.target, self.args, self.kwargs = node.target, args, kwargs
        self.operand_shapes = tuple(tuple(tensors_of(f)[0].shape) for f in fetched)
        self.result_shapes = shapes

    def start(self, factor: str) -> Any:
        rule = rule_of(self.node)
        assert rule is not None
        sharding = [i for i, s in enumerate(self.chosen) if s.factor == factor]
        if not sharding:
            return None
        length = _factor_length((*rule.operands, *rule.results), factor)
        total: fx.Node | None = None
        for i in sharding:
            if self.chosen[i].segments != 1:
                raise VerifyError(
                    f"partition: {self.target} needs the first index of its shard of '{factor}', "
                    "which is split in segments. This is a bug in the rule."
                )
            axis = self.partitioner.axes[i]
            length //= axis.size
            coordinate = self.partitioner.coordinate(axis.name)
            offset = self._call(aten.mul.Tensor, coordinate, length)
            total = offset if total is None else self._call(aten.add.Tensor, total, offset)
        return total

    def coordinates(self, result: int, dim: int) -> Any:
        states = tuple(strategy.results[result] for strategy in self.chosen)
        axes = self.partitioner.axes
        length = tensors_of(self.node)[result].shape[dim]
        names, sizes, segments = [], [], []
        for i, state in enumerate(states):
            placement = state.value
            if not isinstance(placement, Shard) or placement.dim != dim:
                continue
            runs = local_runs(length, i, states, axes, dim)
            if runs is None or isinstance(placement.segments, tuple):
                raise VerifyError(
                    f"partition: no global index of %{self.node.name} along dim {dim} placed as "
                    f"{[str(s) for s in states]}. This is a bug in the placement pass."
                )
            names.append(axes[i].name)
            sizes.append(axes[i].size)
            segments.append(len(runs))
        if not names:
            return None
        indices = [self.partitioner.coordinate(name) for name in names]
        return self._call(msc_ops.global_coordinates.default, length, indices, sizes, segments)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.partitioner.call(target, *args, source=self.node)
        node.meta["differentiable"] = False
        return node


def _factor_length(all_dims: Sequence[Any], factor: str) -> int:
    for dims in all_dims:
        for dim in dims:
            for run in dim:
                for name, length in run:
                    if name == factor:
                        return int(length)
    raise KeyError(factor)


def placeholder_states(
    gm: fx.GraphModule, per_axis: Sequence[Mapping[fx.Node, State]]
) -> dict[fx.Node, States]:
    """Zip the states over several axes of a graph's placeholders."""
    return {
        node: tuple(states[node] for states in per_axis)
        for node in gm.graph.nodes
        if node.op == "placeholder"
    }


def parts(axes: Sequence[Axis]) -> int:
    """Number of parts that the axes make together."""
    return math.prod(axis.size for axis in axes)
