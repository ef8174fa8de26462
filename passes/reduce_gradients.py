"""Reduce the gradients of a rank, each once per step, in buckets.

    %f = flatten([%g2, %g1])                 with ZeRO:  %f = flatten_shards([%g2, %g1], ..)
    %r = wait(all_reduce(%f, 'sum', 'dp'))               %r = wait(reduce_scatter(%f, .., 'dp'))
    %u = unflatten(%r, shapes)                           %u = unflatten(%r, shapes of shards)

A gradient that is partial over mesh axes is summed over them; that of a weight on several pipeline
stages over those stages, too. Where dp ranks hold shards, each gets its shard of the sum, unless
the backward has seen to that with every micro-batch; the other axes then sum shards.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from msc.cost.flops import nbytes
from msc.ir import actions
from msc.ir.placement import Partial
from msc.passes.buckets import bucket_limit, buckets
from msc.passes.chunks import Chunk
from msc.passes.compilation import Compilation
from msc.passes.zero.collectives import Act, ShardGroup

c10d = torch.ops._c10d_functional

Gradients = dict[str, fx.Node]


def reduce_gradients(
    act: Act,
    unit: Compilation,
    sharding: ShardGroup | None,
    chunks: Sequence[Chunk],
    gradients: Gradients,
) -> None:
    """Put the gradients, reduced over dp and tp, in the place of the rank's own ones.

    act: `act(function, *args, val=...)` appends a call to the rank graph; sharding: how dp ranks
    split them; chunks: the rank's; gradients: by parameter, in the order of the forward.
    """
    split = {} if sharding is None else sharding.shards
    scattered: dict[int, list[str]] = {}
    summed: dict[tuple[str, int], list[str]] = {}
    for name in gradients:
        states = unit.parameter_states[name]
        axes = [a for a, s in states.items() if a != "mb" and isinstance(s.grad, Partial)]
        # by chunk: one whose backwards are over need not wait for another
        chunk = next(c.index for c in chunks if name in c.parameter_gradients)
        if name in split:
            if unit.settings.zero < 2:
                scattered.setdefault(chunk, []).append(name)
            replicas = unit.settings.replica_group or ""
            axes = [a for a in (replicas if axis == "dp" else axis for axis in axes) if a]
        if axes:
            summed.setdefault((",".join(axes), chunk), []).append(name)
    for members in scattered.values():
        assert sharding is not None
        limit = _limit(unit, "reduce_scatter", sharding.group, members, gradients)
        for bucket in buckets(members, gradients, limit):
            for started in sharding.start_reductions(act, {n: gradients[n] for n in bucket}):
                gradients |= started.finish(act)
    for (group, _), members in summed.items():
        limit = _limit(unit, "all_reduce", group, members, gradients)
        for bucket in buckets(members, gradients, limit):
            _all_reduce(act, unit, group, bucket, gradients)


def reduce_tied(act: Act, unit: Compilation, gradients: Gradients) -> None:
    """Sum those of weights on several pipeline stages, which are reduced on each of them."""
    tied: dict[str, list[str]] = {}
    for name in gradients:
        stages = unit.stages_of[name]
        if len(stages) > 1:
            tied.setdefault(f"pp[{','.join(map(str, stages))}]", []).append(name)
    # stages read tied weights in different orders; what they reduce together has one order
    for group, members in sorted(tied.items()):
        limit = _limit(unit, "all_reduce", group, members, gradients)
        for bucket in buckets(sorted(members), gradients, limit):
            _all_reduce(act, unit, group, bucket, gradients)


def _limit(
    unit: Compilation, kind: str, group: str, names: Sequence[str], gradients: Gradients
) -> float:
    whole = sum(nbytes(gradients[name].meta["val"]) for name in names)
    return bucket_limit(unit.settings, kind, group, whole)


def _all_reduce(
    act: Act, unit: Compilation, group: str, names: list[str], gradients: Gradients
) -> None:
    nodes = [gradients[name] for name in names]
    values = [node.meta["val"] for node in nodes]
    with unit.fake_mode:
        val = torch.empty(sum(v.numel() for v in values), dtype=values[0].dtype)
    flat = act(actions.flatten, nodes, val=val)
    start = act(c10d.all_reduce.default, flat, "sum", group, val=val)
    done = act(c10d.wait_tensor.default, start, val=val)
    split = act(actions.unflatten, done, [tuple(v.shape) for v in values], val=tuple(values))
    for index, name in enumerate(names):
        gradients[name] = act(operator.getitem, split, index, val=values[index])
