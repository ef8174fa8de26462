"""The memory that the ranks of a group share for their fused kernels.

    gathered rows, twice | announcements | flags | slots, twice | counters of each sum, twice

All calls of a group take turns in the same two buffers, each of the size of the largest call: what
`gather_gemm` and `gemm_scatter` say of two calls in a row holds whichever calls they are, since
every call of a kind waits for data of every rank. Counters count arrivals of a whole call, and
calls of several shapes have several numbers of tiles, so each has counters of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.codegen.kernel_calls.fused_collectives import FusedCall, GatherPlan, ScatterPlan
from msc.codegen.kernels.protocol import MAX_SPLITS

_ALIGNMENT = 256
_FLAG_BYTES = 4


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a rank's part of the memory, in bytes; equal on all ranks."""

    gathered_size: int
    announced: int
    flags: int
    slots: int
    slots_size: int
    counters: dict[FusedCall, int]
    total: int


def layout_of(calls: Sequence[FusedCall]) -> Layout:
    """The layout for the calls of one group."""
    gathers = [call.plan for call in calls if isinstance(call.plan, GatherPlan)]
    ranks = max((plan.chunks.ranks for plan in gathers), default=0)
    gathered = max((_gathered_bytes(plan) for plan in gathers), default=0)
    slots = max((_slots_bytes(c.plan) for c in calls if isinstance(c.plan, ScatterPlan)), default=0)
    announced_at = 2 * gathered
    flags_at = announced_at + _aligned(ranks * _FLAG_BYTES)
    slots_at = flags_at + _aligned(ranks * MAX_SPLITS * _FLAG_BYTES)
    end = slots_at + 2 * slots
    counters: dict[FusedCall, int] = {}
    for call in calls:
        if isinstance(call.plan, ScatterPlan):
            counters[call] = end
            end += 2 * _counter_bytes(call.plan)
    return Layout(gathered, announced_at, flags_at, slots_at, slots, counters, end)


class Arena:
    """Views of the memory of all ranks of a group; `parts[rank]` is a rank's, of bytes, zeroed."""

    def __init__(self, layout: Layout, parts: Sequence[Tensor]) -> None:
        self._layout = layout
        self._parts = parts
        self._tables: dict[tuple[int, torch.dtype], Tensor] = {}

    def gathered(self, rank: int, turn: int, plan: GatherPlan) -> Tensor:
        """A rank's buffer of gathered rows [rows, columns]."""
        start = turn * self._layout.gathered_size
        return self._view(rank, start, (plan.chunks.rows, plan.columns), plan.dtype)

    def announced(self, rank: int) -> Tensor:
        """By source, the number of the last call whose rows a rank was told of: int32."""
        return self._view(rank, self._layout.announced, (len(self._parts),), torch.int32)

    def flags(self, rank: int, plan: GatherPlan) -> Tensor:
        """A rank's flags, as many as the plan has: int32."""
        return self._view(rank, self._layout.flags, (plan.chunks.flags,), torch.int32)

    def slots(self, rank: int, turn: int, plan: ScatterPlan) -> Tensor:
        """What all ranks store at a rank: [ranks, rows of a rank, columns]."""
        start = self._layout.slots + turn * self._layout.slots_size
        return self._view(rank, start, plan.staged, plan.dtype)

    def counters(self, rank: int, turn: int, call: FusedCall, plan: ScatterPlan) -> Tensor:
        """A rank's counters of a call: int32."""
        start = self._layout.counters[call] + turn * _counter_bytes(plan)
        return self._view(rank, start, (plan.counters,), torch.int32)

    def addresses(self, views: Sequence[Tensor]) -> Tensor:
        """The addresses of one view per rank, on the device of the first; made once."""
        key = (views[0].data_ptr(), views[0].dtype)
        if key not in self._tables:
            own = [view.data_ptr() for view in views]
            self._tables[key] = torch.tensor(own, dtype=torch.int64, device=views[0].device)
        return self._tables[key]

    def _view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._parts[rank][start : start + size].view(dtype).view(shape)


def _gathered_bytes(plan: GatherPlan) -> int:
    return _aligned(plan.chunks.rows * plan.columns * plan.dtype.itemsize)


def _slots_bytes(plan: ScatterPlan) -> int:
    return _aligned(torch.Size(plan.staged).numel() * plan.dtype.itemsize)


def _counter_bytes(plan: ScatterPlan) -> int:
    return _aligned(plan.counters * _FLAG_BYTES)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
