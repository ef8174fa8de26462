"""Fused collectives in shared memory equal the collective and its GEMMs, on threads as ranks.

Each rank's side of the memory is an object of its own, as in processes; GEMMs and waits let other
threads run.
"""

from __future__ import annotations

import functools
import math
import mmap
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msc.ir.errors import CommunicationError
from msc.ir.ops.collectives import simulate
from msc.ir.ops.fused_collectives import product, products
from msc.runtime.fused_collectives import all_gather_matmul, matmul_reduce_scatter
from msc.runtime.process_groups import Communicator
from msc.runtime.shared_memory import SharedMemory, memory_bytes

HALF = 1 << 16


def memories(size: int, timeout_s: float = 60.0, seed: int | None = None) -> list[SharedMemory]:
    """What each of `size` ranks has of one memory; ranks are 10, 11, ...; with `seed` slow ones."""
    mapped = mmap.mmap(-1, memory_bytes(size, HALF))
    members = tuple(range(10, 10 + size))
    given = [
        (mapped, HALF, Communicator(None, members, position), "tp", timeout_s, lambda _: True)
        for position in range(size)
    ]
    if seed is None:
        return [SharedMemory(*each) for each in given]
    return [SlowMemory(*each, seed=seed + rank) for rank, each in enumerate(given)]


def together(size: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


class Call:
    """One fused collective of all ranks, with what it should yield."""

    def __init__(self, data: st.DataObject, size: int, seed: int) -> None:
        draw = data.draw
        self.size = size
        self.shape = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=4)))
        self.dim = draw(st.integers(0, len(self.shape) - 2))
        self.gathers = draw(st.booleans())
        self.transposed = draw(st.booleans())
        k, n = self.shape[-1], draw(st.integers(1, 4))
        self.weight = floats(*((k, n) if self.transposed else (n, k)), seed=seed + 1)
        self.whole = (
            *self.shape[: self.dim],
            size * self.shape[self.dim],
            *self.shape[self.dim + 1 : -1],
        )
        given = self.shape if self.gathers else (*self.whole, k)
        self.inputs = [floats(*given, seed=seed + 10 * rank) for rank in range(size)]
        kind = draw(st.sampled_from(["", "bias", "sum"]))
        added = (n,) if kind == "bias" else (*self.whole, n)
        alone = not kind or (self.gathers and kind == "sum")
        self.add = [None if alone else floats(*added, seed=seed + 3 + rank) for rank in range(size)]
        self.keep = draw(st.booleans())
        self.others = [floats(*self.whole, 2, seed=seed + 5)] * draw(st.integers(0, 2))
        self.is_first = [True, False][: len(self.others)]

    def operands(self, rank: int) -> tuple[Any, ...]:
        add = self.add[rank]
        flags = [self.transposed] * 2
        return [self.weight] * 2, [add, None], flags, self.others, self.is_first, self.keep

    def run(self, memory: SharedMemory) -> list[Tensor]:
        rank = memory.position
        x = self.inputs[rank]
        if self.gathers:
            return all_gather_matmul(memory, "here", x, self.dim, *self.operands(rank))
        add = self.add[rank]
        args = (self.weight, add, self.transposed, self.dim)
        return [matmul_reduce_scatter(memory, "here", x, *args)]

    def expected(self) -> list[list[Tensor]]:
        if self.gathers:
            runs = [self.shape[self.dim]]
            whole = simulate("all_gather", self.inputs, dim=self.dim, runs=runs)[0]
            return [products(whole, *self.operands(rank)) for rank in range(self.size)]
        summands = [
            product(x, self.weight, add, self.transposed)
            for x, add in zip(self.inputs, self.add, strict=True)
        ]
        length = self.whole[self.dim] // self.size
        parts = simulate("reduce_scatter", summands, dim=self.dim, runs=[length])
        return [[part] for part in parts]


class SlowMemory(SharedMemory):
    """Takes its time, at random, before a call, and before it reads what has come."""

    def __init__(self, *args: Any, seed: int) -> None:
        super().__init__(*args)
        self._random = random.Random(seed)

    def _dawdle(self) -> None:
        time.sleep(self._random.choice([0, 0, 0, 1e-3]))

    def begin(self, text: str) -> None:
        self._dawdle()
        super().begin(text)

    def _wait(self, flag: int, source: int) -> None:
        super()._wait(flag, source)
        self._dawdle()


@given(st.integers(2, 4), st.data(), st.integers(0, 1000))
@settings(max_examples=40)
def test_calls_in_a_row_equal_the_unfused_ones(size: int, data: st.DataObject, seed: int) -> None:
    """Whoever is late: a later call writes over nothing that is still to be read."""
    count = data.draw(st.integers(1, 4))
    calls = [Call(data, size, seed + 100 * number) for number in range(count)]
    own = memories(size, seed=seed)
    found = together(size, lambda position: [call.run(own[position]) for call in calls])
    for number, call in enumerate(calls):
        for position, expected in enumerate(call.expected()):
            torch.testing.assert_close(found[position][number], expected, rtol=1e-12, atol=1e-12)


def test_sums_are_made_in_rank_order() -> None:
    """Bit for bit, whoever comes last: in float32 the order of three numbers decides the sum."""
    values = (1e8, 1.0, -1e8)
    own = memories(3)
    one = torch.ones(1, 1)
    for last in range(3):

        def rank(position: int, last: int = last) -> Tensor:
            if position == last:
                time.sleep(5e-3)
            x = torch.full((3, 1), values[position])
            return matmul_reduce_scatter(own[position], "here", x, one, None, False, 0)

        in_order = (torch.tensor(values[0]) + values[1]) + values[2]
        assert [result.item() for result in together(3, rank)] == [in_order.item()] * 3


def test_nothing_that_is_returned_lies_in_shared_memory() -> None:
    own = memories(2)
    w = floats(4, 3)

    def call(position: int, number: int) -> list[Tensor]:
        x = floats(2, 3, seed=number)
        return all_gather_matmul(own[position], "here", x, 0, [w], [None], [False], [], [], True)

    first = together(2, lambda position: call(position, 0))
    kept = [[each.clone() for each in results] for results in first]
    for number in range(1, 4):
        together(2, functools.partial(call, number=number))
    torch.testing.assert_close(first, kept, rtol=0, atol=0)


def gather_alone(memory: SharedMemory) -> None:
    x, w = floats(2, 3), floats(4, 3)
    all_gather_matmul(memory, "%y (up)", x, 0, [w], [None], [False], [], [], False)


def reduce_alone(memory: SharedMemory) -> None:
    matmul_reduce_scatter(memory, "%y (up)", floats(2, 3), floats(4, 3), None, False, 0)


@pytest.mark.parametrize(
    ("call", "name"), [(gather_alone, "all_gather_matmul"), (reduce_alone, "matmul_reduce_scatter")]
)
def test_a_rank_that_does_not_come_is_named(
    call: Callable[[SharedMemory], None], name: str
) -> None:
    here, _ = memories(2, timeout_s=0.05)
    with pytest.raises(CommunicationError) as error:
        call(here)
    assert str(error.value) == (
        f"rank 10 waits for rank 11 in {name} at %y (up), call 1 of the shared memory of group "
        "'tp' (10, 11), but rank 11 gave nothing for 0.05 s, after its call 0. Look at its output, "
        "and restart."
    )


def test_a_rank_that_is_stuck_in_a_call_is_told_from_one_that_has_not_come() -> None:
    here, other = memories(2, timeout_s=0.05)
    other.begin("anything")
    with pytest.raises(CommunicationError, match=r"gave nothing for 0\.05 s, in this call"):
        matmul_reduce_scatter(here, "%y", floats(2, 3), floats(4, 3), None, False, 0)


def test_a_call_has_room_for_what_it_needs() -> None:
    """Rooms of two calls in a row do not overlap, and the third is the first again."""
    (memory, _) = memories(2)
    starts = []
    for _ in range(3):
        memory.begin("call")
        room = memory.room((HALF // 8,), torch.float64)
        starts.append(room.data_ptr())
    assert abs(starts[1] - starts[0]) == HALF
    assert starts[2] == starts[0]
    assert all(start % 64 == 0 for start in starts)
    assert math.prod(room.shape) * 8 == HALF
