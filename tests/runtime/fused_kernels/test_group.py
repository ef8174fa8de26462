"""Fused collectives in kernels equal the unfused pair: any call, after any others, on all ranks."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from msc.codegen.kernel_calls import call as kernel_call
from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.kernel_calls.device import kernels_for
from msc.codegen.kernel_calls.fused_collectives import (
    FusedCall,
    GatherPlan,
    ScatterPlan,
    gather_plan,
    scatter_plan,
)
from msc.codegen.kernels.description import Kernel
from msc.ir.ops.collectives import simulate
from msc.ir.ops.fused_collectives import product, products
from msc.runtime.fused_kernels.arena import layout_of
from msc.runtime.fused_kernels.group import FusedGroup
from msc.runtime.fused_kernels.queues import Connection
from msc.runtime.fused_kernels.virtual import VirtualKernels
from msc.testing.interpreter import Deadlock
from msc.testing.interpreter.queues import InterpretedQueues, interpreted_together

CPU = torch.device("cpu")
SIZE = 2
INTERPRETER = kernels_for("interpreter")


def floats(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Gather:
    """A call of all ranks: k columns, several weights of both layouts, with and without bias."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dim: int,
        weights: Sequence[tuple[int, bool, bool]],
        others: Sequence[bool] = (),
        keep: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.k = shape[-1]
        self.x = [floats(*shape, seed=rank, dtype=dtype) for rank in range(SIZE)]
        whole = (*shape[:dim], SIZE * shape[dim], *shape[dim + 1 : -1])
        self.operands = [
            (
                dim,
                [
                    floats(*((self.k, n) if flag else (n, self.k)), seed=50 + rank, dtype=dtype)
                    for n, flag, _ in weights
                ],
                [
                    floats(n, seed=60 + rank, dtype=dtype) if bias else None
                    for n, _, bias in weights
                ],
                [flag for _, flag, _ in weights],
                [floats(*whole, 6, seed=70 + rank, dtype=dtype) for _ in others],
                list(others),
                keep,
            )
            for rank in range(SIZE)
        ]
        self.plan: GatherPlan | ScatterPlan = gather_plan(INTERPRETER, *self.given[0])

    @property
    def given(self) -> list[tuple[Any, ...]]:
        return [(x, *rest, SIZE, "tp") for x, rest in zip(self.x, self.operands, strict=True)]

    def expected(self) -> list[Any]:
        dim = self.operands[0][0]
        runs = [self.x[0].shape[dim]]
        whole = simulate("all_gather", [x.double() for x in self.x], dim=dim, runs=runs)[0]

        def double(value: Any) -> Any:
            if isinstance(value, list):
                return [double(each) for each in value]
            return value.double() if isinstance(value, Tensor) else value

        return [products(whole, *double(list(rest[1:]))) for rest in self.operands]


class Scatter:
    """A call of all ranks."""

    def __init__(
        self, shape: tuple[int, ...], n: int, dim: int, add: str = "", transposed: bool = False
    ) -> None:
        k = shape[-1]
        added = {"": None, "bias": (n,), "residual": (*shape[:-1], n)}[add]
        self.dim = dim
        self.operands = [
            (
                floats(*shape, seed=rank),
                floats(*((k, n) if transposed else (n, k)), seed=20 + rank),
                None if added is None else floats(*added, seed=30 + rank),
                transposed,
            )
            for rank in range(SIZE)
        ]
        self.plan: GatherPlan | ScatterPlan = scatter_plan(INTERPRETER, *self.given[0])

    @property
    def given(self) -> list[tuple[Any, ...]]:
        return [(*each, self.dim, SIZE, "tp") for each in self.operands]

    def expected(self) -> list[Any]:
        summands = [
            product(x.double(), w.double(), None if a is None else a.double(), flag)
            for x, w, a, flag in self.operands
        ]
        length = summands[0].shape[self.dim] // SIZE
        return simulate("reduce_scatter", summands, dim=self.dim, runs=[length])


CALLS: dict[str, Callable[[], Gather | Scatter]] = {
    "one weight": lambda: Gather((5, 12), 0, [(7, False, True)]),
    "rows that are not together": lambda: Gather((3, 4, 16), 1, [(8, True, False)], [True], True),
    "weights of all kinds": lambda: Gather(
        (1, 20, 16),
        1,
        [(8, False, True), (24, False, True), (8, True, True), (16, False, False)],
        [True, False],
        True,
    ),
    "rows alone": lambda: Gather((9, 16), 0, [], [False, True]),
    "bfloat16": lambda: Gather((8, 16), 0, [(16, False, True)], dtype=torch.bfloat16),
    "a sum": lambda: Scatter((10, 12), 7, 0),
    "a sum with a bias": lambda: Scatter((2, 6, 16), 24, 1, "bias"),
    "a sum with another": lambda: Scatter((3, 8, 16), 8, 1, "residual", True),
}


def run_in_a_row(calls: Sequence[Gather | Scatter], times: int) -> None:
    fused = [FusedCall("msc.op", "", call.plan, "tp") for call in calls]
    together = interpreted_together(SIZE)
    size = layout_of(fused).total

    def connect(nbytes: int) -> Connection:
        assert nbytes == size
        return Connection([torch.zeros(size, dtype=torch.uint8) for _ in range(SIZE)], together)

    group = FusedGroup(fused, SIZE, range(SIZE), connect, lambda problem: problem)
    for _ in range(times):
        for call, own in zip(calls, fused, strict=True):
            found = group.run(own, call.given)
            assert found is not None
            for results, expected in zip(found, call.expected(), strict=True):
                half = call.plan.dtype == torch.bfloat16
                rtol, atol = (2e-2, 5e-2) if half else (1e-4, 1e-4)
                torch.testing.assert_close(
                    results, expected, check_dtype=False, rtol=rtol, atol=atol
                )


@pytest.mark.parametrize("name", CALLS)
def test_a_call_equals_the_unfused_one(name: str) -> None:
    run_in_a_row([CALLS[name]()], 1)


def test_calls_of_all_shapes_take_turns_in_the_same_memory() -> None:
    """Flags count on from call to call, and counters of a shape from one of its calls to the next,
    whichever others come between."""
    names = ("one weight", "a sum", "rows alone", "a sum with a bias", "bfloat16")
    run_in_a_row([CALLS[name]() for name in names], 3)


def test_what_a_call_returns_is_not_written_again() -> None:
    call = CALLS["weights of all kinds"]()
    own = FusedCall("msc.all_gather_matmul", "", call.plan, "tp")
    parts = [torch.zeros(layout_of([own]).total, dtype=torch.uint8) for _ in range(SIZE)]
    connection = Connection(parts, interpreted_together(SIZE))
    group = FusedGroup([own], SIZE, range(SIZE), lambda _: connection, lambda problem: problem)
    found = group.run(own, call.given)
    assert found is not None
    kept = [[each.clone() for each in results] for results in found]
    for part in parts:
        part.fill_(0xFF)
    torch.testing.assert_close(found, kept, rtol=0, atol=0)


class Forgetful(InterpretedQueues):
    """A rank whose copies raise no flags."""

    def raise_flag(self, flags: Tensor, index: int, value: int) -> None:
        pass


def test_a_failed_call_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that were raised for some ranks only would be wrong for all later calls."""
    call = CALLS["one weight"]()
    own = FusedCall("msc.all_gather_matmul", "", call.plan, "tp")
    choice = KernelChoice(INTERPRETER)
    monkeypatch.setattr(choice, "fused_over", lambda group: [own])
    kernels = VirtualKernels(choice, CPU, interpreted_together)
    with monkeypatch.context() as patch:
        patch.setattr("msc.testing.interpreter.queues.InterpretedQueues", Forgetful)
        with pytest.raises(Deadlock, match="rank 0 gather_gemm program"):
            kernels.run(own, (0, 1), call.given)
    found = kernels.run(own, (0, 1), call.given)
    for results, expected in zip(found, call.expected(), strict=True):
        torch.testing.assert_close(results, expected, check_dtype=False, rtol=1e-4, atol=1e-4)


def broken(kernel: Kernel) -> Kernel:
    return dataclasses.replace(kernel, source=f"raise RuntimeError('no room')\n{kernel.source}")


def no_queues() -> Any:
    raise AssertionError("a kernel was launched")


def test_a_kernel_that_fails_on_one_rank_is_given_up_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank in a thread, as a process with its own choice; one of them cannot compile."""
    monkeypatch.setattr(kernel_call, "_warned", set())
    call = CALLS["a sum"]()
    assert isinstance(call.plan, ScatterPlan)
    first, second = call.plan.kernels
    plans = [call.plan, dataclasses.replace(call.plan, kernels=(first, broken(second)))]
    fused = [FusedCall("msc.matmul_reduce_scatter", " in down", plan, "tp") for plan in plans]
    said: list[str] = ["", ""]
    barrier = Barrier(SIZE)
    parts = [torch.zeros(layout_of(fused[:1]).total, dtype=torch.uint8) for _ in range(SIZE)]

    def agree(position: int, problem: str) -> str:
        said[position] = problem
        barrier.wait(60)
        return next(filter(None, said), "")

    def rank(position: int) -> list[Any]:
        own = fused[position]
        group = FusedGroup(
            [own],
            SIZE,
            [position],
            lambda _: Connection(parts, no_queues),
            lambda problem: agree(position, problem),
        )
        return [group.run(own, [call.given[position]]) for _ in range(2)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(SIZE) as pool:
            assert list(pool.map(rank, range(SIZE))) == [[None, None]] * SIZE
    (warning,) = [str(each.message) for each in caught if each.category is RuntimeWarning]
    name = second.name
    assert warning == (
        "msc.matmul_reduce_scatter in down runs without its Triton kernel on all ranks of 'tp': "
        f"{name} does not compile: RuntimeError: no room. From now on the collective and the "
        "products follow each other."
    )
    assert all(name in own.failure for own in fused)


def test_ranks_without_memory_in_common_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_call, "_warned", set())
    calls = [CALLS[name]() for name in ("a sum", "one weight")]
    fused = [FusedCall("msc.op", "", call.plan, "tp") for call in calls]
    group = FusedGroup(fused, SIZE, range(SIZE), lambda _: "they are far apart", lambda text: text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [group.run(own, call.given) for call, own in zip(calls, fused, strict=True)]
    assert found == [None, None]
    assert [own.failure for own in fused] == ["they are far apart"] * 2
    assert "on all ranks of 'tp': they are far apart" in str(caught[0].message)
    assert len(caught) == 1


def test_layouts_do_not_overlap() -> None:
    calls = [CALLS[name]() for name in ("one weight", "a sum", "a sum with a bias")]
    fused = [FusedCall("msc.op", "", call.plan, "tp") for call in calls]
    layout = layout_of(fused)
    gather, *scatters = (call.plan for call in calls)
    assert isinstance(gather, GatherPlan)
    assert layout.gathered_size >= 4 * gather.chunks.rows * gather.columns
    assert layout.announced == 2 * layout.gathered_size
    assert layout.flags >= layout.announced + 4 * SIZE
    assert layout.slots >= layout.flags + 4 * gather.chunks.flags
    assert layout.slots_size >= max(4 * math.prod(p.staged) for p in scatters)  # type: ignore[union-attr]
    starts = [layout.slots + 2 * layout.slots_size, layout.counters[fused[2]], layout.total]
    assert starts[0] == layout.counters[fused[1]]
    assert starts == sorted(set(starts))
