"""Gathers of parameters and reductions of gradients over dp, each a bucket of several tensors.

%f = flatten([%shard1, %shard2])                     %f = flatten_shards([%g1, %g2], dims, 4)
%a = all_gather_into_tensor(%f, 4, 'dp')             %r = reduce_scatter_tensor(%f, .., 'dp')
%w = wait_tensor(%a)                                 %w = wait_tensor(%r)
%u = unflatten_shards(%w, shapes, dims, 4)           %u = unflatten(%w, shapes of shards)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from msc.ir import actions
from msc.ir.data_shard import DataShard
from msc.ir.placement import Shard

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

Act = Callable[..., fx.Node]
"""`act(function, *args, val=...)` adds a call to a graph."""


@dataclass(frozen=True)
class ShardGroup:
    """The ranks among which parameters are split, and how.

    group, parts: its symbolic name and size. shards: by parameter; those that are not in it are
    whole on every rank. master: dtype in which gradients are summed, None for their own.
    """

    group: str
    parts: int
    shards: Mapping[str, DataShard]
    fake_mode: Any
    master: torch.dtype | None = None

    def shard_of(self, name: str, whole: Tensor) -> Tensor:
        """The fake tensor of a rank's shard of a parameter's fake tensor."""
        return self.fake(self.shards[name].shape(whole.shape), whole.dtype)

    def placements_of(self, name: str, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The placements of a rank's shard of a parameter, of which `meta` has the whole one's."""
        if name not in self.shards:
            return {}
        own = {"dp": Shard(self.shards[name].dim)}
        kinds = [kind for kind in ("placement", "grad_placement") if kind in meta]
        return {kind: {**meta[kind], **own} for kind in kinds}

    def start_gathers(self, act: Act, shards: Mapping[str, fx.Node]) -> list[Gathering]:
        """Start to gather some parameters, those of one dtype in one collective."""
        return [self._start_gather(act, each) for each in _by_dtype(shards)]

    def start_reductions(self, act: Act, gradients: Mapping[str, fx.Node]) -> list[Reduction]:
        """Start to sum some gradients, those of one dtype at once; each rank gets its shards."""
        return [self._start_reduction(act, each) for each in _by_dtype(gradients)]

    def _start_gather(self, act: Act, shards: Mapping[str, fx.Node]) -> Gathering:
        vals = [node.meta["val"] for node in shards.values()]
        sizes = [val.numel() for val in vals]
        dtype = vals[0].dtype
        flat = act(actions.flatten, list(shards.values()), val=self.fake((sum(sizes),), dtype))
        val = self.fake((self.parts * sum(sizes),), dtype)
        start = act(c10d.all_gather_into_tensor.default, flat, self.parts, self.group, val=val)
        return Gathering(self, tuple(shards), start)

    def _start_reduction(self, act: Act, gradients: Mapping[str, fx.Node]) -> Reduction:
        vals = [node.meta["val"] for node in gradients.values()]
        shapes = [self.shards[n].shape(v.shape) for n, v in zip(gradients, vals, strict=True)]
        dtype = self.master or vals[0].dtype
        converted = () if dtype == vals[0].dtype else (dtype,)
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        flat = act(
            actions.flatten_shards,
            list(gradients.values()),
            [self.shards[name].dim for name in gradients],
            self.parts,
            *converted,
            val=self.fake((self.parts * numel,), dtype),
        )
        val = self.fake((numel,), dtype)
        reduce = c10d.reduce_scatter_tensor.default
        start = act(reduce, flat, "sum", self.parts, self.group, val=val)
        return Reduction(self, tuple(gradients), start, tuple(map(tuple, shapes)))

    def fake(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fake tensor."""
        with self.fake_mode:
            return torch.empty(tuple(shape), dtype=dtype)


@dataclass(frozen=True)
class Gathering:
    """A gather in flight."""

    sharding: ShardGroup
    names: tuple[str, ...]
    start: fx.Node

    def finish(self, act: Act, wholes: Sequence[Tensor]) -> dict[str, fx.Node]:
        """Wait; the whole parameters by name. `wholes` are their fake tensors."""
        done = act(c10d.wait_tensor.default, self.start, val=self.start.meta["val"])
        split = act(
            actions.unflatten_shards,
            done,
            [tuple(whole.shape) for whole in wholes],
            [self.sharding.shards[name].dim for name in self.names],
            self.sharding.parts,
            val=tuple(wholes),
        )
        return _items(act, split, self.names)


@dataclass(frozen=True)
class Reduction:
    """A sum of gradients in flight."""

    sharding: ShardGroup
    names: tuple[str, ...]
    start: fx.Node
    shapes: tuple[tuple[int, ...], ...]

    def finish(self, act: Act) -> dict[str, fx.Node]:
        """Wait; this rank's shards of the sums, by parameter."""
        flat = self.start.meta["val"]
        done = act(c10d.wait_tensor.default, self.start, val=flat)
        vals = tuple(self.sharding.fake(shape, flat.dtype) for shape in self.shapes)
        split = act(actions.unflatten, done, list(self.shapes), val=vals)
        return _items(act, split, self.names)


def _by_dtype(nodes: Mapping[str, fx.Node]) -> list[dict[str, fx.Node]]:
    found: dict[torch.dtype, dict[str, fx.Node]] = {}
    for name, node in nodes.items():
        found.setdefault(node.meta["val"].dtype, {})[name] = node
    return list(found.values())


def _items(act: Act, split: fx.Node, names: Sequence[str]) -> dict[str, fx.Node]:
    values = split.meta["val"]
    return {n: act(operator.getitem, split, i, val=values[i]) for i, n in enumerate(names)}
