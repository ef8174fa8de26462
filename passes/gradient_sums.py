"""Sum a rank's gradients over micro-batches, chunk by chunk.

    %g = accumulate(None, %b0[1])
    %g = accumulate(%g, %b1[1])

With ZeRO 2 and 3 the sums are of shards: a chunk reduces most gradients of each micro-batch over dp
inside of its backward; those of its last block are reduced here, beside the step that follows. Or
the gradients of several micro-batches are summed first, and all are reduced here.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from msc.cost.flops import nbytes
from msc.ir import actions
from msc.passes.buckets import buckets
from msc.passes.chunks import Chunk
from msc.passes.zero.collectives import Act, Reduction, ShardGroup

aten = torch.ops.aten

Part = tuple[int, int]
"""A chunk, and which of its sums: of the gradients that it gives at once, or of later ones."""


@dataclass
class GradientSums:
    """Totals of the gradients of a rank's chunks, appended to a rank graph by `act`.

    summed: the fake tensor of a sum of values like the given one, in the dtype of sums; master:
    that dtype where it is not the gradients' own; sharding: of what is reduced during the step,
    None where nothing is; together: of how many of a chunk's `micro_batches` at once; limit: bytes
    of a bucket, of so many in all.
    """

    act: Act
    summed: Callable[[Tensor], Tensor]
    master: torch.dtype | None
    sharding: ShardGroup | None
    together: int
    micro_batches: int
    limit: Callable[[float], float]
    counts: Counter[int] = field(default_factory=Counter)
    totals: dict[Part, fx.Node] = field(default_factory=dict)
    names: dict[Part, tuple[str, ...]] = field(default_factory=dict)
    flying: list[tuple[Part, list[Reduction], dict[str, fx.Node]]] = field(default_factory=list)

    def add(self, chunk: Chunk, call: fx.Node) -> None:
        """Add the gradients that a call of a backward gives."""
        if self.sharding is None:
            self._sum((chunk.index, 0), tuple(chunk.parameter_gradients), self._pick(call, 1))
            return
        if self.together > 1:
            self._add_whole(chunk, call)
            return
        if chunk.reduced:
            self._sum((chunk.index, 0), chunk.reduced, self._pick(call, 1))
        given = self._pick(call, 2)
        self._reduce(chunk, {n: self._pick(given, i) for i, n in enumerate(chunk.not_reduced)})

    def _add_whole(self, chunk: Chunk, call: fx.Node) -> None:
        """Sum gradients of several micro-batches; reduce what the last of them completes."""
        part = (chunk.index, 2)
        self._sum(part, tuple(chunk.parameter_gradients), self._pick(call, 1))
        self.counts[chunk.index] += 1
        count = self.counts[chunk.index]
        if count % self.together == 0 or count == self.micro_batches:
            total, names = self.totals.pop(part), self.names.pop(part)
            self._reduce(chunk, {n: self._pick(total, i) for i, n in enumerate(names)})

    def _reduce(self, chunk: Chunk, gradients: dict[str, fx.Node]) -> None:
        """Start to reduce those that are split; all are added when the next call is over."""
        assert self.sharding is not None
        split = [name for name in gradients if name in self.sharding.shards]
        whole = {n: node for n, node in gradients.items() if n not in self.sharding.shards}
        limit = math.inf  # of one block
        if self.together > 1:
            limit = self.limit(sum(nbytes(gradients[name].meta["val"]) for name in split))
        started = [
            reduction
            for names in buckets(split, gradients, limit)
            for reduction in self.sharding.start_reductions(
                self.act, {name: gradients[name] for name in names}
            )
        ]
        self.flying.append(((chunk.index, 1), started, whole))

    def settle(self) -> None:
        """Wait for the reductions in flight and add what they give."""
        for part, started, whole in self.flying:
            found = dict(whole)
            for reduction in started:
                found |= reduction.finish(self.act)
            if found:
                self._sum(part, tuple(found), tuple(found.values()))
        self.flying.clear()

    def finish(self) -> dict[str, fx.Node]:
        """The sums over micro-batches and chunks, by parameter."""
        self.settle()
        parts: dict[str, list[fx.Node]] = {}
        for part, total in self.totals.items():
            for index, name in enumerate(self.names[part]):
                parts.setdefault(name, []).append(self._pick(total, index))
        return {name: functools.reduce(self._add, each) for name, each in parts.items()}

    def _sum(self, part: Part, names: tuple[str, ...], values: fx.Node | Sequence[fx.Node]) -> None:
        """Add gradients to a total, which is in the dtype of sums."""
        whole = isinstance(values, fx.Node)
        vals = values.meta["val"] if whole else [value.meta["val"] for value in values]  # type: ignore[union-attr]
        dtype = () if self.master is None else (self.master,)
        total = self.totals.get(part)
        val = tuple(map(self.summed, vals))
        self.totals[part] = self.act(actions.accumulate, total, values, *dtype, val=val)
        self.names[part] = names

    def _pick(self, node: fx.Node, index: int) -> fx.Node:
        return self.act(operator.getitem, node, index, val=node.meta["val"][index])

    def _add(self, left: fx.Node, right: fx.Node) -> fx.Node:
        return self.act(aten.add.Tensor, left, right, val=left.meta["val"])
