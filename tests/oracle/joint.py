"""Run a joint graph (forward and backward of a whole model) on simulated ranks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from msc.ir.structure import placeholders
from msc.ir.torch_private import joint_graph, joint_inputs, joint_outputs
from tests.oracle.rules import RULES
from tests.oracle.values import Value, everywhere, reduced, take, whole

aten = torch.ops.aten

POINTWISE = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.mul.Scalar, aten.div.Scalar, aten.add.Scalar, aten.neg.default, aten.rsqrt.default),
    *(aten.gelu.default, aten.gelu_backward.default, aten.silu.default),
    *(aten.silu_backward.default, aten.pow.Tensor_Scalar, aten._to_copy.default),
    *(aten.where.self, aten.ne.Scalar, aten.detach.default),
}
ADDITIVE = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.detach.default}
"""Ops of which a sum of terms may stay one."""


@dataclass
class Ranks:
    """Interprets a joint graph; `parallel` counts calls on parts, `gathered` those on wholes."""

    count: int
    parallel: Counter[str] = field(default_factory=Counter)
    gathered: Counter[str] = field(default_factory=Counter)

    def run(self, joint: fx.GraphModule, arguments: Mapping[fx.Node, Value]) -> dict[fx.Node, Any]:
        """Values of all nodes."""
        env: dict[fx.Node, Any] = dict(arguments)
        for node in joint.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = self.call(node, args, kwargs)
        return env

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The value, or the tuple of values, of one call."""
        target: Any = node.target
        if target is operator.getitem:
            return args[0][args[1]]
        values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Value)]
        found: Any = None
        if target in POINTWISE:
            found = _pointwise(target, args, kwargs)
        elif target in RULES:
            found = RULES[target](*args, **kwargs)
        if found is not None:
            spread = any(not value.replicated for value in (*values, *pytree.tree_leaves(found)))
            self.parallel[str(target)] += spread
            return found
        if any(value.dim is not None for value in values):
            self.gathered[str(target)] += 1
        return self._on_wholes(target, args, kwargs)

    def _on_wholes(self, target: Any, args: Any, kwargs: Any) -> Any:
        wholes = pytree.tree_map(lambda a: whole(a) if isinstance(a, Value) else a, (args, kwargs))
        results = []
        for rank in range(self.count):
            local_args, local_kwargs = pytree.tree_map(
                lambda a, r=rank: a.parts[r] if isinstance(a, Value) else a, wholes
            )
            results.append(target(*local_args, **local_kwargs))
        if isinstance(results[0], Tensor):
            return Value(tuple(results))
        return tuple(Value(tuple(parts)) for parts in zip(*results, strict=True))


def _pointwise(target: Any, args: Any, kwargs: Any) -> Value | None:
    """Operands are brought to the shard of the first sharded one; broadcast dims stay whole."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    values = [leaf for leaf in leaves if isinstance(leaf, Value)]
    if values and all(value.partial for value in values) and target in ADDITIVE:
        return _apply(target, leaves, spec, Value((), partial=True), len(values[0].parts))
    leaves = [reduced(leaf) if isinstance(leaf, Value) else leaf for leaf in leaves]
    values = [leaf for leaf in leaves if isinstance(leaf, Value)]
    count = max(len(value.shape) for value in values)
    lead = next((value for value in values if value.dim is not None), None)
    if lead is None:
        return _apply(target, leaves, spec, Value(()), len(values[0].parts))
    assert lead.dim is not None
    from_end = lead.dim - len(lead.shape)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Value):
            leaves[position] = _aligned(leaf, lead, from_end)
    how = Value((), count + from_end, lead.indices)
    return _apply(target, leaves, spec, how, len(lead.parts))


def _aligned(value: Value, lead: Value, from_end: int) -> Value:
    dim = len(value.shape) + from_end
    if value.dim == dim and value.same_shard(lead):
        return value
    value = whole(value)
    if dim < 0 or value.shape[dim] == 1:
        return value
    return take(value, dim, lead.indices)


def _apply(target: Any, leaves: Sequence[Any], spec: Any, how: Value, ranks: int) -> Value:
    parts = []
    for rank in range(ranks):
        local = [leaf.parts[rank] if isinstance(leaf, Value) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(local, spec)
        parts.append(target(*args, **kwargs))
    return Value(tuple(parts), how.dim, how.indices, how.partial)


def differentiate(forward: fx.GraphModule) -> fx.GraphModule:
    """The joint graph of a whole forward graph, on global shapes."""
    with forward.meta["fake_mode"]:
        inputs = []
        for node in placeholders(forward):
            like = node.meta["val"]
            fresh = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            inputs.append(fresh.requires_grad_(bool(node.meta.get("requires_grad"))))
    return joint_graph(forward, inputs)


def sharded_gradients(
    forward: fx.GraphModule,
    values: Mapping[str, Tensor],
    shards: Mapping[str, tuple[int, Sequence[Tensor]]],
    ranks: Ranks,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Value]]:
    """Loss, whole gradients, and gradients as the ranks have them, by the parameter's name.

    `values` are those of the forward graph's placeholders by name; `shards` says which rows of
    which dim of a parameter each rank holds.
    """
    joint = differentiate(forward)
    primals, tangents = joint_inputs(joint)
    outputs, gradients = joint_outputs(joint)
    nodes = placeholders(forward)
    arguments = {
        node: everywhere(torch.ones((), dtype=torch.float64), ranks.count)
        for node in tangents.values()
    }
    for index, node in primals.items():
        name = nodes[index].meta["name"]
        value = everywhere(values[name], ranks.count)
        arguments[node] = take(value, *shards[name]) if name in shards else value
    env = ranks.run(joint, arguments)
    local = {
        nodes[index].meta["name"]: env[gradient]
        for index, gradient in gradients.items()
        if isinstance(gradient, fx.Node)
    }
    found = {name: _agreed(value) for name, value in local.items()}
    return _agreed(env[outputs[0]]), found, local


def _agreed(value: Value) -> Tensor:
    """The whole value, which must be the same on all ranks."""
    parts = whole(value).parts
    assert all(torch.equal(part, parts[0]) for part in parts[1:])
    return parts[0]
