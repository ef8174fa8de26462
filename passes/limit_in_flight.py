"""Let only so many gathers, and so many reductions, of a step be on their way at once on a group.

    %a1 = all_gather(..); %a2 = ..; %a3 = ..       %a1 = all_gather(..); %a2 = ..
    %w1 = wait(%a1)                          ->    %w1 = wait(%a1)
                                                   %a3 = all_gather(..)

    %r1 = all_reduce(%f1); %r2 = ..; %r3 = ..      %r1 = all_reduce(%f1); %r2 = ..
                                             ->    %w1 = wait(%r1)
    %w1 = wait(%r1)                                %r3 = all_reduce(%f3)

One in flight holds its operand and its result, and a group's collectives run one after the other:
more than a few at once take memory and save no time. A gather starts later, for its reader comes
late; a reduction is waited for earlier, since its operand then ends. Groups over pipeline stages
are left alone: there one stage's wait could hold up what the other needs. Numerics: kept bit for
bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from msc.ir.communication import COLLECTIVES, WAITS, group_of
from msc.ir.groups import Group
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.compilation import Compilation

_c10d = torch.ops._c10d_functional
_REDUCTIONS = {_c10d.all_reduce.default, _c10d.reduce_scatter_tensor.default}


@dataclass(frozen=True)
class LimitInFlight(GraphPass):
    """Start gathers later and wait for reductions earlier, so that the limit holds."""

    name: ClassVar[str] = "limit-in-flight"
    numerics: ClassVar[str] = BIT_EXACT

    def applies_to(self, name: str) -> bool:
        """Rank graphs."""
        return name.startswith("rank.")

    def run(self, gm: fx.GraphModule, unit: Compilation) -> int:
        limit = unit.settings.in_flight
        gathers: dict[str, list[fx.Node]] = defaultdict(list)
        reductions: dict[str, list[fx.Node]] = defaultdict(list)
        for node in gm.graph.nodes:
            if node.target not in COLLECTIVES or "pp" in Group.parse(group_of(node)).axes:
                continue
            (reductions if node.target in _REDUCTIONS else gathers)[group_of(node)].append(node)
        moved = sum(_start_later(starts, limit) for starts in gathers.values())
        return moved + sum(_wait_earlier(starts, limit) for starts in reductions.values())


def _wait(start: fx.Node) -> fx.Node:
    (wait,) = (user for user in start.users if user.target in WAITS)
    return wait


def _start_later(starts: Sequence[fx.Node], limit: int) -> int:
    """Move each start behind the wait of the one `limit` before it, where that comes later."""
    moved = 0
    for before, start in zip(starts, starts[limit:], strict=False):
        landed = _wait(before)
        if start < landed < _wait(start):
            operands = [n for n in start.all_input_nodes if n.op != "placeholder"]
            for node in (start, *(n for n in operands if set(n.users) == {start})):
                landed.append(node)  # each right behind it, so what is made first is moved last
            moved += 1
    return moved


def _wait_earlier(starts: Sequence[fx.Node], limit: int) -> int:
    """Move the wait of the one `limit` before each start before it, where that comes later."""
    moved = 0
    for before, start in zip(starts, starts[limit:], strict=False):
        landed = _wait(before)
        if start < landed:
            start.prepend(landed)
            moved += 1
    return moved
