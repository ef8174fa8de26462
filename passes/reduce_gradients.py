"""Reduce the gradients of a rank, each once per step, in buckets.

    %f = flatten([%g2, %g1])
    %r = wait(all_reduce(%f, 'sum', 'dp'))         over every axis that owes it
    %u = unflatten(%r, shapes)

A gradient that is partial over mesh axes is summed over them; that of a weight on several pipeline
stages over those stages, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from msc.ir import actions
from msc.ir.placement import Partial
from msc.passes.chunks import Chunk
from msc.passes.compilation import Compilation
from msc.passes.gradient_buckets import buckets

c10d = torch.ops._c10d_functional


def reduce_gradients(
    act: Callable[..., fx.Node],
    unit: Compilation,
    chunks: Sequence[Chunk],
    gradients: dict[str, fx.Node],
) -> None:
    """Put the reduced gradients in the place of the rank's own ones.

    act: `act(function, *args, val=...)` appends a call to the rank graph; chunks: the rank's;
    gradients: by parameter, in the order of the forward.
    """
    limit = unit.settings.bucket_bytes
    first: dict[tuple[str, int], list[str]] = {}
    tied: dict[str, list[str]] = {}
    for name in gradients:
        states = unit.parameter_states[name]
        axes = [a for a, s in states.items() if a != "mb" and isinstance(s.grad, Partial)]
        if axes:
            # by chunk: one whose backwards are over need not wait for another
            chunk = next((c.index for c in chunks if name in c.parameter_gradients), -1)
            first.setdefault((",".join(axes), chunk), []).append(name)
        stages = unit.stages_of[name]
        if len(stages) > 1:
            tied.setdefault(f"pp[{','.join(map(str, stages))}]", []).append(name)
    for (group, _), members in first.items():
        for bucket in buckets(members, gradients, limit):
            _all_reduce(act, unit, group, bucket, gradients)
    # stages read tied weights in different orders; what they reduce together has one order
    for group, members in sorted(tied.items()):
        for bucket in buckets(sorted(members), gradients, limit):
            _all_reduce(act, unit, group, bucket, gradients)


def _all_reduce(
    act: Callable[..., fx.Node],
    unit: Compilation,
    group: str,
    names: list[str],
    gradients: dict[str, fx.Node],
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
