"""Fingerprints of replicas: integer sums of raw words, which any single flipped bit changes.

Ranks that hold the same part of a parameter, or of the optimizer's state, hold equal bits. Each
part has a slot in one vector, and one all-reduce of largest and smallest sums tells every rank
whether all of them agree; only if they do not are the sums exchanged, to see who differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.runtime.checkpoint.states import StateTensor, StateTensors
from msc.runtime.state import RankState

AllReduce = Callable[[Tensor, str], Tensor]
"""Reduces an int64 vector over all ranks, by "max" or "sum"."""

_NONE = torch.iinfo(torch.int64).min
_SHOWN = 8  # parts whose sums are exchanged
_WORDS = {1: torch.int8, 2: torch.int16}


@dataclass(frozen=True)
class Difference:
    """A part whose replicas differ.

    tensor: its name, as in a checkpoint. holders: all ranks that have the part. ranks: those that
    differ from the majority; all holders if there is none.
    """

    tensor: str
    holders: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.ranks == self.holders:
            return f"{self.tensor}: one of ranks {_list(self.holders)}, which hold copies"
        word = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{self.tensor}: {word} {_list(self.ranks)} of ranks {_list(self.holders)}"


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def word_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's raw words of at most 4 bytes, 0-dim int64; below 2**62 in size.

    Any one changed bit changes it by a power of two. Tensors have 2**31 words at most.
    """
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_WORDS.get(tensor.element_size(), torch.int32)).sum(dtype=torch.int64)


class Replicas:
    """The parts of a program's parameters and optimizer states that several ranks hold."""

    def __init__(self, states: StateTensors, rank: int) -> None:
        self._world = states.mesh.size
        self._rank = rank
        self._slots: list[tuple[StateTensor, list[int]]] = [
            (tensor, ranks)
            for tensor in states.tensors
            if tensor.kind != "buffer"  # a rank keeps old ones that its stage does not read
            for _, ranks in tensor.parts(states.mesh)
            if len(ranks) > 1
        ]

    @property
    def count(self) -> int:
        """How many parts are compared."""
        return len(self._slots)

    def differences(self, state: RankState, all_reduce: AllReduce) -> list[Difference]:
        """The parts that differ, the first few of them; equal on all ranks, collective."""
        if not self._slots:
            return []
        sums = {
            place: word_sum(part)
            for place, (tensor, ranks) in enumerate(self._slots)
            if self._rank in ranks and (part := tensor.of(state)) is not None
        }
        found = all_reduce(self._ends(sums), "max").cpu()
        wrong = (found[0] != -found[1]).nonzero().flatten().tolist()[:_SHOWN]
        if not wrong:
            return []
        rows = torch.zeros(self._world, len(wrong), dtype=torch.int64)
        for column, place in enumerate(wrong):
            if place in sums:
                rows[self._rank, column] = int(sums[place])
        rows = all_reduce(rows, "sum").cpu()
        return [
            _difference(self._slots[place], rows[:, column].tolist())
            for column, place in enumerate(wrong)
        ]

    def _ends(self, sums: dict[int, Tensor]) -> Tensor:
        """The largest sum of each part, and the largest negated one, of this rank alone."""
        ends = torch.full((2, len(self._slots)), _NONE, dtype=torch.int64)
        if sums:
            values = torch.stack(list(sums.values())).cpu()
            places = list(sums)
            ends[0, places], ends[1, places] = values, -values
        return ends


def _difference(slot: tuple[StateTensor, list[int]], values: list[int]) -> Difference:
    tensor, ranks = slot
    counts = Counter(values[rank] for rank in ranks).most_common(2)
    holders = tuple(ranks)
    if counts[0][1] == counts[-1][1]:
        return Difference(tensor.name, holders, holders)
    usual = counts[0][0]
    return Difference(tensor.name, holders, tuple(r for r in ranks if values[r] != usual))
