"""A flipped bit of one replica is found and its rank named; sound replicas are equal."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import msc
from msc.checkpoint.program_state import state_tensors
from msc.program import Program
from msc.runtime.corruption.fingerprints import Difference, Replicas, word_sum
from msc.runtime.state import RankState
from tests import models

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool]


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit of a tensor's memory."""
    raw = tensor.view(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(3).to(dtype).view(3, 1)
    sound = word_sum(tensor)
    for bit in range(8 * tensor.nbytes):
        flip(tensor, bit)
        assert word_sum(tensor) != sound
        flip(tensor, bit)
    assert word_sum(tensor) == sound
    assert word_sum(tensor.expand(3, 2)) == 2 * sound
    assert word_sum(tensor[:0]) == 0


class Ranks:
    """All ranks of a program as threads that reduce with each other."""

    def __init__(self, program: Program, states: Sequence[RankState]) -> None:
        self.states = states
        tensors = state_tensors(program)
        self.replicas = [Replicas(tensors, rank) for rank in range(program.mesh.size)]
        self.barrier = threading.Barrier(len(states))
        self.given: dict[int, Tensor] = {}
        self.reductions = 0

    def all_reduce(self, rank: int) -> Callable[[Tensor, str], Tensor]:
        def reduce(value: Tensor, op: str) -> Tensor:
            self.given[rank] = value
            self.barrier.wait(30)
            stacked = torch.stack([self.given[r] for r in range(len(self.states))])
            self.barrier.wait(30)
            self.reductions += rank == 0
            return stacked.amax(0) if op == "max" else stacked.sum(0)

        return reduce

    def differences(self) -> list[Difference]:
        """What all ranks find, which is the same."""
        found: dict[int, list[Difference]] = {}

        def look(rank: int) -> None:
            all_reduce = self.all_reduce(rank)
            found[rank] = self.replicas[rank].differences(self.states[rank], all_reduce)

        threads = [threading.Thread(target=look, args=(r,)) for r in range(len(self.states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = found[0]
        assert all(each == first for each in found.values())
        return first


@functools.cache
def trained(mesh: str, **options: Any) -> Ranks:
    """All ranks after two steps."""
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=2)
    batch = tuple(torch.cat([part] * 3)[:6] for part in models.tokens())
    adamw = msc.AdamW(lr=1e-2, max_norm=1.0)
    program = msc.compile(model, batch, mesh=mesh, optimizer=adamw, **options)
    state = program.run_virtual(batch).state
    return Ranks(program, program.run_virtual(batch, state).state)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=3", {}),
        ("pp=2,dp=2,tp=2", {"microbatches": 1}),
        ("dp=2,tp=2", {}),
        ("dp=2", {"zero": 1}),
        ("pp=2,tp=2", {"precision": "bf16-mixed"}),
    ],
)
def test_replicas_of_sound_ranks_are_equal(mesh: str, options: dict[str, Any]) -> None:
    ranks = trained(mesh, **options)
    assert ranks.differences() == []
    assert ranks.reductions == (1 if ranks.replicas[0].count else 0)


def test_a_flipped_bit_is_found_and_its_rank_is_named() -> None:
    ranks = trained("dp=3")
    chance = random.Random(0)
    for _ in range(40):
        rank = chance.randrange(3)
        state = ranks.states[rank]
        kind = chance.choice(["model", "optimizer"])
        values = state.parameters if kind == "model" else state.moments
        name = chance.choice(sorted(values))
        bit = chance.randrange(8 * values[name].nbytes)
        flip(values[name], bit)
        assert ranks.differences() == [Difference(f"{kind}.{name}", (0, 1, 2), (rank,))]
        flip(values[name], bit)
    assert ranks.differences() == []


def test_of_two_copies_neither_is_blamed_alone() -> None:
    ranks = trained("dp=2,tp=2")
    parts = {len(ranks): tensor for tensor, ranks in ranks.replicas[3]._slots if 3 in ranks}
    assert parts.keys() == {2, 4}  # shards, and what every rank holds whole
    for count, tensor in parts.items():
        value = tensor.of(ranks.states[3])
        assert value is not None
        flip(value, 5)
        (found,) = ranks.differences()
        assert (found.tensor, len(found.holders)) == (tensor.name, count)
        assert found.ranks == ((3,) if count == 4 else (1, 3))
        flip(value, 5)
    two = Difference("model.w", (1, 3), (1, 3))
    assert str(two) == "model.w: one of ranks 1, 3, which hold copies"
    assert str(Difference("model.w", (0, 1, 2), (1,))) == "model.w: rank 1 of ranks 0, 1, 2"
