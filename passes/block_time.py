"""The modelled time of a graph in an order: computing, and collectives that run beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from msc.ir.communication import COLLECTIVES, FUSED, WAITS, group_of
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Settings


def block_time(order: Sequence[fx.Node], settings: Settings) -> float:
    """In the unit of `settings.cost`; the calls of a block, started one after the other.

    The collectives of a group run one after the other, beside what computes, until they are waited
    for. Whoever takes part in one starts it at the same time.
    """
    clock = 0.0
    free: defaultdict[str, float] = defaultdict(float)  # when a group has ended what it was given
    ends: dict[Any, float] = {}
    for node in order:
        cost = call_cost(node, settings)
        if node.target in COLLECTIVES:
            group = group_of(node)
            free[group] = ends[node] = max(clock, free[group]) + cost
        elif node.target in WAITS:
            clock = max(clock, ends.get(node.args[0], 0.0))
        elif node.target in FUSED:
            clock = free[group_of(node)] = max(clock, free[group_of(node)]) + cost
        else:
            clock += cost
    return clock
