"""The end of a rank's step: the global norm of the gradients, and the optimizer.

    %n = squared_norm(gradients, copies)
    %r = all_reduce(%n, 'sum', 'pp,tp')            one number, after all gradients are reduced
    %norm = sqrt(%r)
    %scale = clamp(max_norm / (%norm + 1e-6), max=1)
    %skip = logical_not(isfinite(%norm))           where such steps are skipped
    %skipped = add(%skipped_before, %skip)
    %t = sub(%step, %skipped_before)               steps that changed something, and this one
    %lr = learning_rate(%t, ..)
    %p = adam(.., %t, %lr, .., %scale, %skip)      one for each set of hyperparameters

An optimizer that needs sums over whole parameters (`Optimizer.sums`) has two actions, with one
all-reduce between them for all parameters:

    %s = lamb_sums(..)
    %r = all_reduce(cat(%s[0], ..), 'sum', 'tp')
    %p = lamb(.., %r, ..)

All of these are tensors: the host reads none of them before the parameters have changed. Numerics:
equal to `torch.nn.utils.clip_grad_norm_` and `torch.optim`; norms and rates are in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msc.ir import actions
from msc.ir.optimizer import LearningRate, Optimizer
from msc.ir.placement import Shard
from msc.passes.compilation import Compilation, Settings

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

_TINY = 1e-6  # what clip_grad_norm_ adds to the norm before it divides by it

Act = Callable[..., fx.Node]
"""`act(function, *args, val=...)` appends a call to the graph."""


def state_keys(settings: Settings, names: Sequence[str]) -> list[str]:
    """What the optimizer keeps of these parameters: `first_moment.h.0.weight` and so on."""
    kept = {name: settings.optimizer_of(name).state_names for name in names}
    states = dict.fromkeys(state for each in kept.values() for state in each)
    return [f"{state}.{name}" for state in states for name in names if state in kept[name]]


@dataclass
class OptimizerStep:
    """Appends the optimizer's step to a rank graph.

    parameters: by name; gradients: of those that this rank trains, of the whole batch, for what it
    holds of each; states: by `state_keys`; step: counts steps from 1; skipped: how many before this
    one were skipped, None if none ever is.

    changed, kept: names of the parameters, and keys of the states, in the order of the outputs.
    """

    act: Act
    unit: Compilation
    parameters: Mapping[str, fx.Node]
    gradients: Mapping[str, fx.Node]
    states: Mapping[str, fx.Node]
    step: fx.Node
    skipped: fx.Node | None

    def __post_init__(self) -> None:
        self.changed: list[str] = []
        self.kept: list[str] = []
        self._rates: dict[LearningRate, fx.Node] = {}

    def append(self) -> dict[str, Any]:
        """The outputs: "parameters", their states ("optimizer"), and what the step tells.

        The first two are nested as the actions give them, an item for each set of hyperparameters;
        `changed` and `kept` name what is in them, flat. Every rank must have these nodes, also one
        that trains nothing.
        """
        spec = self.unit.settings.optimizer
        assert spec is not None
        outputs: dict[str, Any] = {}
        scale = skip = None
        if spec.needs_norm:
            outputs["grad_norm"] = norm = self._norm()
            scale = None if spec.max_norm is None else self._scale(norm, spec.max_norm)
            if self.skipped is not None:
                skip = self._is_not_finite(norm)
                outputs["skipped"] = self._count(aten.add.Tensor, self.skipped, skip)
                self.step = self._count(aten.sub.Tensor, self.step, self.skipped)
        if isinstance(spec.lr, LearningRate):
            outputs["learning_rate"] = self._rate(spec.lr)
        if self.gradients:
            outputs |= self._stepped(scale, skip)
        return outputs

    # -- the norm

    def _norm(self) -> fx.Node:
        """The global norm of the gradients: 0-dim float64."""
        axes = [axis for axis in ("pp", "tp") if self.unit.settings.mesh.axis_size(axis) > 1]
        if self.unit.data_shards:
            axes.insert(1 if "pp" in axes else 0, "dp")
        if self.gradients:
            copies = [num_copies(self.unit, name, axes) for name in self.gradients]
            total = self._number(actions.squared_norm, list(self.gradients.values()), copies)
        else:  # a stage that trains nothing still takes part in the sum
            total = self._number(aten.full.default, [], 0.0)
            total.kwargs = {"dtype": torch.float64}
        return self._number(aten.sqrt.default, self._all_reduce(total, axes))

    def _scale(self, norm: fx.Node, max_norm: float) -> fx.Node:
        """What scales the gradients to `max_norm`: 0-dim float64."""
        divisor = self._number(aten.add.Tensor, norm, _TINY)
        inverse = self._number(aten.reciprocal.default, divisor)
        quotient = self._number(aten.mul.Tensor, inverse, max_norm)
        return self._number(aten.clamp.default, quotient, None, 1.0)

    def _is_not_finite(self, norm: fx.Node) -> fx.Node:
        val = self._val(torch.bool)
        return self.act(
            aten.logical_not.default, self.act(aten.isfinite.default, norm, val=val), val=val
        )

    # -- the step

    def _stepped(self, scale: fx.Node | None, skip: fx.Node | None) -> dict[str, Any]:
        members: dict[Optimizer, list[str]] = {}
        for name in self.gradients:
            members.setdefault(self.unit.settings.optimizer_of(name), []).append(name)
        summed = self._sums(members, scale, skip)
        changed: list[fx.Node] = []
        kept: list[fx.Node] = []
        for spec, names in members.items():
            values = [self.parameters[name] for name in names]
            lr = self._rate(spec.lr) if isinstance(spec.lr, LearningRate) else spec.lr
            if spec in summed:
                sums, states = summed[spec]
                operands: tuple[Any, ...] = (values, sums, states, self.step, lr)
                flags = _given(skip)
            else:
                gradients = [self.gradients[name] for name in names]
                operands = (values, gradients, self._states(spec, names), self.step, lr)
                flags = _given(scale, skip)
            vals = tuple(node.meta["val"] for node in values)
            val = (vals, (vals,) * len(spec.state_names))
            call = self.act(spec.action, *operands, *spec.arguments, *flags, val=val)
            changed.append(self._item(call, 0))
            kept.append(self._item(call, 1))
            self.changed += names
            self.kept += [f"{state}.{name}" for state in spec.state_names for name in names]
        return {"parameters": tuple(changed), "optimizer": tuple(kept)}

    def _sums(
        self,
        members: Mapping[Optimizer, list[str]],
        scale: fx.Node | None,
        skip: fx.Node | None,
    ) -> dict[Optimizer, tuple[fx.Node, fx.Node]]:
        """What `Optimizer.sums` gives, summed over all ranks that hold shards, and the states."""
        first = {spec: names for spec, names in members.items() if spec.sums is not None}
        axes = _sharding_axes(self.unit, [name for names in first.values() for name in names])
        parts: list[fx.Node] = []
        states: list[fx.Node] = []
        for spec, names in first.items():
            values = [self.parameters[name] for name in names]
            vals = tuple(node.meta["val"] for node in values)
            call = self.act(
                spec.sums,
                values,
                [self.gradients[name] for name in names],
                self._states(spec, names),
                self.step,
                *spec.arguments,
                [num_copies(self.unit, name, axes) for name in names],
                *_given(scale, skip),
                val=(self._val(torch.float64, 2 * len(names)), (vals,) * len(spec.state_names)),
            )
            parts.append(self._item(call, 0))
            states.append(self._item(call, 1))
        if axes:
            parts = self._all_reduce_together(parts, axes)
        return dict(zip(first, zip(parts, states, strict=True), strict=True))

    def _all_reduce_together(self, parts: list[fx.Node], axes: Sequence[str]) -> list[fx.Node]:
        """The sums over ranks of some 1-D tensors, by one all-reduce."""
        vals = tuple(part.meta["val"] for part in parts)
        sizes = [val.numel() for val in vals]
        flat = self.act(aten.cat.default, parts, val=self._val(torch.float64, sum(sizes)))
        total = self._all_reduce(flat, axes)
        return self._items(self.act(aten.split_with_sizes.default, total, sizes, val=vals))

    # -- nodes

    def _states(self, spec: Optimizer, names: Sequence[str]) -> list[list[fx.Node]]:
        return [[self.states[f"{state}.{name}"] for name in names] for state in spec.state_names]

    def _rate(self, rate: LearningRate) -> fx.Node:
        """The learning rate of this step, 0-dim float64; one node for equal ones."""
        if rate not in self._rates:
            phases = [tuple(phase) for phase in rate.phases]
            node = self._number(actions.learning_rate, self.step, phases, rate.held)
            self._rates[rate] = node
        return self._rates[rate]

    def _all_reduce(self, value: fx.Node, axes: Sequence[str]) -> fx.Node:
        if not axes:
            return value
        val = value.meta["val"]
        start = self.act(c10d.all_reduce.default, value, "sum", ",".join(axes), val=val)
        return self.act(c10d.wait_tensor.default, start, val=val)

    def _number(self, function: Any, *args: Any) -> fx.Node:
        return self.act(function, *args, val=self._val(torch.float64))

    def _count(self, function: Any, *args: Any) -> fx.Node:
        return self.act(function, *args, val=self._val(torch.int64))

    def _val(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        with self.unit.fake_mode:
            return torch.empty(shape, dtype=dtype)

    def _items(self, node: fx.Node) -> list[fx.Node]:
        return [self._item(node, index) for index in range(len(node.meta["val"]))]

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        return self.act(operator.getitem, node, index, val=node.meta["val"][index])


def num_copies(unit: Compilation, name: str, axes: Sequence[str]) -> int:
    """How many of the ranks that differ on `axes` hold the same shard of a parameter."""
    copies = 1
    for axis in axes:
        if axis == "pp":
            copies *= len(unit.stages_of[name])
        elif axis == "dp" and name in unit.data_shards:
            copies *= unit.settings.mesh.axis_size("dp") // unit.data_shards[name].parts
        elif not _is_sharded(unit, name, axis):
            copies *= unit.settings.mesh.axis_size(axis)
    return copies


def _is_sharded(unit: Compilation, name: str, axis: str) -> bool:
    if axis == "dp":
        return name in unit.data_shards
    state = unit.parameter_states[name].get(axis)
    return state is not None and isinstance(state.value, Shard)


def _sharding_axes(unit: Compilation, names: Sequence[str]) -> list[str]:
    """The mesh axes that shard one of these parameters."""
    return [
        axis
        for axis, size in unit.settings.mesh
        if size > 1 and any(_is_sharded(unit, name, axis) for name in names)
    ]


def _given(*flags: fx.Node | None) -> tuple[fx.Node | None, ...]:
    """Optional arguments, without those at the end that are None."""
    found = list(flags)
    while found and found[-1] is None:
        found.pop()
    return tuple(found)
