"""What fused kernels put into CUDA's streams, in which order, by streams that do it at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from msc.codegen.kernel_calls.device import kernels_for
from msc.codegen.kernel_calls.fused_collectives import (
    FusedCall,
    GatherPlan,
    gather_plan,
    scatter_plan,
)
from msc.codegen.kernels import launch as launching
from msc.codegen.kernels.description import Kernel
from msc.runtime.fused_kernels.arena import Arena, layout_of
from msc.runtime.fused_kernels.cuda import Driver, process_together, virtual_together
from msc.runtime.fused_kernels.group import FusedGroup
from msc.runtime.fused_kernels.queues import Connection, Together
from msc.testing.interpreter import interpreted

INTERPRETER = kernels_for("interpreter")


@dataclass(eq=False)
class Stream:
    """Notes what it is told to wait for; `device` has the one that is current."""

    name: str
    device: Device

    def wait_stream(self, other: Stream) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")


@dataclass
class Device:
    """Everything happens at once: right only if it is put into streams in a possible order."""

    log: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    strict: bool = True
    """Whether all ranks are here, so that nothing is left to wait for."""

    def __post_init__(self) -> None:
        self.current = Stream("current", self)

    @property
    def driver(self) -> Driver:
        return Driver(
            lambda: self.current, self.stream, self.on, self.write, self.wait, self.launch
        )

    def stream(self) -> Stream:
        return Stream(self.names.pop(0), self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def write(self, flags: Tensor, index: int, value: int) -> None:
        flags[index] = value
        self.log.append(f"{self.current.name} sets {index} to {value}")

    def wait(self, flags: Tensor, index: int, value: int) -> None:
        self.log.append(f"{self.current.name} waits until {index} is {value}")
        if self.strict:
            assert int(flags[index]) >= value, "it would wait for what is put into a stream later"

    def launch(self, kernel: Kernel, values: Mapping[str, Any]) -> None:
        self.log.append(f"{self.current.name} launches {kernel.entry}")
        if kernel.entry != "scatter_sum":  # which waits for the other ranks
            with interpreted():
                launching.launch(kernel, values)


def gather(size: int) -> tuple[FusedCall, list[tuple[Any, ...]], Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(16, 16, generator=generator) for _ in range(size)]
    w = torch.randn(24, 16, generator=generator)
    given: list[tuple[Any, ...]]
    given = [(each, 0, [w], [None], [False], [], [], False, size, "tp") for each in x]
    plan = gather_plan(INTERPRETER, *given[0])
    return FusedCall("msc.all_gather_matmul", "", plan, "tp"), given, torch.cat(x) @ w.t()


def memory(calls: Sequence[FusedCall], size: int) -> list[Tensor]:
    return [torch.zeros(layout_of(calls).total, dtype=torch.uint8) for _ in range(size)]


def group(
    call: FusedCall, size: int, here: Sequence[int], parts: Sequence[Tensor], together: Together
) -> FusedGroup:
    connection = Connection(parts, together)
    return FusedGroup([call], size, here, lambda _: connection, lambda problem: problem)


def test_virtual_ranks() -> None:
    """A rank copies another's rows after that rank has written them, and before its own kernel."""
    call, given, expected = gather(2)
    assert isinstance(call.plan, GatherPlan)
    device = Device(names=["main 0", "copies 0", "main 1", "copies 1"])
    own = group(call, 2, range(2), memory([call], 2), virtual_together(2, device.driver))
    for number in (1, 2, 3):
        device.log.clear()
        found = own.run(call, given)
        assert found is not None
        for (result,) in found:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        flags = [
            [f"copies {rank} sets {4 * (1 - rank) + part} to {number}" for part in range(4)]
            for rank in range(2)
        ]
        assert call.plan.chunks.splits == 4
        assert device.log == [
            "main 0 waits for current",
            "main 1 waits for current",
            f"main 0 sets 0 to {number}",
            "copies 0 waits for main 0",
            f"main 1 sets 1 to {number}",
            "copies 1 waits for main 1",
            f"copies 0 waits until 1 is {number}",
            *flags[0],
            f"copies 1 waits until 0 is {number}",
            *flags[1],
            "main 0 launches gather_gemm",
            "main 0 waits for copies 0",
            "main 1 launches gather_gemm",
            "main 1 waits for copies 1",
            "current waits for main 0",
            "current waits for copies 0",
            "current waits for main 1",
            "current waits for copies 1",
        ]


def test_a_process() -> None:
    """Rank 1 of 3 copies from 2 and then from 0, each after it was told."""
    call, given, _ = gather(3)
    device = Device(names=["copies"], strict=False)
    parts = memory([call], 3)
    own = group(call, 3, [1], parts, process_together(1, device.driver))
    found = own.run(call, [given[1]])
    assert found is not None
    arena = Arena(layout_of([call]), parts)
    assert [arena.announced(rank).tolist() for rank in range(3)] == [[0, 1, 0], [0] * 3, [0, 1, 0]]
    assert device.log == [
        "current sets 1 to 1",
        "current sets 1 to 1",
        "copies waits for current",
        "copies waits until 2 is 1",
        *(f"copies sets {flag} to 1" for flag in (8, 9, 10, 11)),
        "copies waits until 0 is 1",
        *(f"copies sets {flag} to 1" for flag in (0, 1, 2, 3)),
        "current launches gather_gemm",
        "current waits for copies",
    ]
    # the other ranks have written nothing: of their rows there are zeros, of its own the product
    x, w = given[1][0], given[1][2][0]
    ((result,),) = found
    torch.testing.assert_close(result[16:32], x @ w.t(), rtol=1e-5, atol=1e-5)
    assert not result[:16].any()
    assert not result[32:].any()


@pytest.mark.parametrize("virtual", [True, False])
def test_a_reduction_is_tiles_and_then_their_sum(virtual: bool) -> None:
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    operands = (x, w, None, False, 0, 2, "tp")
    call = FusedCall("msc.matmul_reduce_scatter", "", scatter_plan(INTERPRETER, *operands), "tp")
    device = Device(names=["main 0", "copies 0", "main 1", "copies 1"])
    if virtual:
        together, here = virtual_together(2, device.driver), [0, 1]
    else:
        together, here = process_together(0, device.driver), [0]
    own = group(call, 2, here, memory([call], 2), together)
    assert own.run(call, [operands] * len(here)) is not None
    launched = [line for line in device.log if "launches" in line]
    names = [f"main {rank}" for rank in here] if virtual else ["current"]
    both = ("gemm_scatter", "scatter_sum")
    assert launched == [f"{name} launches {kernel}" for kernel in both for name in names]
