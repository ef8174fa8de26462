"""A call that a rule's `localize` makes local, inside a graph under construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from msc.ir.errors import VerifyError
from msc.ir.placement import Shard, Split
from msc.ir.values import tensors_of
from msc.passes.sharding.axes import Axis, local_runs
from msc.passes.sharding.calls import rule_of
from msc.passes.sharding.local_graph import LocalGraph
from msc.passes.sharding.rule import LocalCall, Strategy

_CPU = torch.device("cpu")
msc_ops = torch.ops.msc
aten = torch.ops.aten


class GraphCall(LocalCall):
    """One call with its chosen strategies, one per axis; answers with nodes of the new graph."""

    def __init__(
        self,
        local: LocalGraph,
        node: fx.Node,
        chosen: tuple[Strategy, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fetched: Sequence[fx.Node],
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        self.local = local
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
            split = self.chosen[i].split
            if split.segments != 1:
                raise VerifyError(
                    f"partition: {self.target} needs the first index of its shard of '{factor}', "
                    "which is split in segments. This is a bug in the rule."
                )
            axis = self.local.axes[i]
            offset = self._first_index(split, length, axis)
            length = split.part(length, axis.size, axis.part)
            total = offset if total is None else self._call(aten.add.Tensor, total, offset)
        return total

    def _first_index(self, split: Split, run: int, axis: Axis) -> fx.Node:
        """Where this rank's part of a run starts, in terms of its coordinate.

        All ranks that share this graph have parts of one length; where lengths differ, those of
        the ranks before the first of them are longer.
        """
        own = split.part(run, axis.size, axis.part)
        before = sum(split.part(run, axis.size, rank) for rank in range(axis.part))
        offset = self._call(aten.mul.Tensor, self.local.coordinate(axis.name), own)
        ahead = before - own * axis.part
        return self._call(aten.add.Tensor, offset, ahead) if ahead else offset

    def coordinates(self, result: int, dim: int) -> Any:
        states = tuple(strategy.results[result] for strategy in self.chosen)
        axes = self.local.axes
        length = tensors_of(self.node)[result].shape[dim]
        names, sizes, segments = [], [], []
        for i, state in enumerate(states):
            placement = state.value
            if not isinstance(placement, Shard) or placement.dim != dim:
                continue
            runs = local_runs(length, i, states, axes, dim)
            if placement.unit and runs is not None:
                return self._unequal_coordinates(placement, length, axes[i])
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
        indices = [self.local.coordinate(name) for name in names]
        return self._call(msc_ops.global_coordinates.default, length, indices, sizes, segments)

    def _unequal_coordinates(self, placement: Shard, length: int, axis: Axis) -> fx.Node:
        """The only axis that splits the dim does so in parts of unequal length."""
        parts: list[fx.Node] = []
        first = 0
        for run in placement.run_lengths(length):
            start = self._call(aten.add.Tensor, self._first_index(placement, run, axis), first)
            count = placement.part(run, axis.size, axis.part)
            steps = self.local.call(
                aten.arange.default, count, source=self.node, dtype=torch.int64, device=_CPU
            )
            steps.meta["differentiable"] = False
            parts.append(self._call(aten.add.Tensor, steps, start))
            first += run
        return parts[0] if len(parts) == 1 else self._call(aten.cat.default, parts)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.local.call(target, *args, source=self.node)
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
