"""Fused kernels between virtual ranks on one device, and an all-gather over PCIe that they hide.

What one device cannot show: NVLink, its latency, and ranks that are not in step.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import Case, Make, Sizes
from benchmarks.gpu_kernels import launcher, shapes_of, target_of, tiles_of
from benchmarks.gpu_references import linear_float64
from msc.codegen.kernels import gather_gemm, gemm_scatter
from msc.codegen.kernels.description import Kernel, Target
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gemm_scatter import GemmScatter
from msc.codegen.kernels.protocol import buffer_of

SPARE = 36
"""Processors left to copies and flags, so that what kernels wait for can always run."""


def part_of(target: Target, ranks: int) -> Target:
    """The part of a device that each virtual rank may fill."""
    if target.processors <= SPARE:
        return target
    return dataclasses.replace(target, processors=(target.processors - SPARE) // ranks)


def scatter_rank_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """GEMM + reduce-scatter of all ranks at once; the second call must give the same bits."""
    if dtype != torch.bfloat16:
        return
    shapes = shapes_of(sizes)
    (m, n, k), ranks = shapes.fused, shapes.ranks
    target = part_of(target_of(make), ranks)
    tiles = dataclasses.replace(tiles_of(make, target), parts=1, stages=3)
    made = GemmScatter(m, n, k, ranks, "bfloat16", target, tiles)
    kernels = (gemm_scatter.emit(made), gemm_scatter.emit_sum(made))
    chunk = made.chunks.chunk
    factors = [
        (make.normal(m, k, dtype=dtype), make.normal(n, k, dtype=dtype)) for _ in range(ranks)
    ]
    slots = [[_empty(make, ranks, chunk, n, dtype=dtype) for _ in range(ranks)] for _ in range(2)]
    counters = [
        [torch.zeros(made.counters, dtype=torch.int32, device=make.device) for _ in range(ranks)]
        for _ in range(2)
    ]
    results = [_empty(make, chunk, n, dtype=dtype) for _ in range(ranks)]
    state = {"call": 0}

    def call() -> list[Tensor]:
        state["call"] += 1
        turn = buffer_of(state["call"])
        given = [
            {
                "a": a,
                "b": b,
                "c": results[rank],
                "slots": slots[turn][rank],
                "slots_of": _addresses(slots[turn], make.device),
                "counters": counters[turn][rank],
                "counters_of": _addresses(counters[turn], make.device),
                "rank": rank,
                "want": gemm_scatter.want(ranks, state["call"]),
            }
            for rank, (a, b) in enumerate(factors)
        ]
        run_ranks(make.device, kernels, given, seed=state["call"])
        return [result.clone() for result in results]

    def wanted() -> list[Tensor]:
        total = torch.zeros(m, n, dtype=torch.float64, device=make.device)
        for a, b in factors:
            total += linear_float64(a, b)
        return list(torch.split(total, chunk))

    first = call()
    name = f"kernel gemm_scatter, {ranks} virtual ranks"
    yield Case(name, call, wanted, None, 2.0 * m * n * k * ranks, "TFLOP/s", dtype)
    yield Case(f"{name}, same bits", call, lambda: first, None, 1.0, "TFLOP/s", dtype, exact=True)


def pcie_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """All-gather over PCIe and GEMM in one kernel, beside one after the other.

    `ratio` is over copies and then cuBLAS; the report tells which share of the copies was hidden.
    """
    if dtype != torch.bfloat16:
        return
    for m, n, k in shapes_of(sizes).pcie:
        made = PcieGather(make, m, n, k, dtype)
        yield Case(
            f"kernel gather_gemm over PCIe, n={n}",
            made.fused,
            made.expected,
            made.serial,
            2.0 * m * n * k,
            "TFLOP/s",
            dtype,
            parts=(made.copies, made.product),
        )


class PcieGather:
    """c[m, n] = a[m, k] @ b.T, where all rows of a but the first rank's come from host memory."""

    def __init__(self, make: Make, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.ranks = 8 if m > 64 else 2
        target = target_of(make)
        tiles = tiles_of(make, target)
        made = GatherGemm(m, k, (n,), self.ranks, "bfloat16", target, tiles)
        self.kernel = gather_gemm.emit(made)
        self.chunk = made.chunks.chunk
        self.a, self.b = make.normal(m, k, dtype=dtype), make.normal(n, k, dtype=dtype)
        self.c = _empty(make, m, n, dtype=dtype)
        self.host = self.a.cpu().pin_memory() if make.device == "cuda" else self.a.clone()
        self.flags = torch.zeros(self.ranks, dtype=torch.int32, device=make.device)
        self.link = Link(make.device)
        self.call = 0

    def fused(self) -> Tensor:
        """Copies on a second stream, each with its flag, while the kernel runs."""
        self.call += 1
        with self.link.beside():
            for source in range(1, self.ranks):
                rows = slice(source * self.chunk, (source + 1) * self.chunk)
                self.a[rows].copy_(self.host[rows], non_blocking=True)
                self.link.write(self.flags, source, self.call)
        known = {"flags": self.flags, "rank": 0, "want": self.call}
        launcher(self.kernel, {"a": self.a, "b": self.b, "c": self.c, **known})()
        self.link.join()
        return self.c

    def copies(self) -> None:
        """The same copies alone."""
        self.a[self.chunk :].copy_(self.host[self.chunk :], non_blocking=True)

    def product(self) -> None:
        """The same product by torch."""
        torch.mm(self.a, self.b.t(), out=self.c)

    def serial(self) -> None:
        """One after the other."""
        self.copies()
        self.product()

    def expected(self) -> Tensor:
        """In float64."""
        return linear_float64(self.a, self.b)


class Link:
    """A stream of copies beside the current one. On the CPU everything happens in order."""

    def __init__(self, device: str) -> None:
        self.stream = _stream() if device == "cuda" else None
        self._driver = ctypes.CDLL("libcuda.so.1") if device == "cuda" else None

    def beside(self) -> Any:
        """What is issued inside runs on the second stream, after what the current one has now."""
        if self.stream is None:
            return torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def write(self, flags: Tensor, index: int, value: int) -> None:
        """flags[index] = value when everything before it in the stream is done, by no kernel."""
        if self.stream is None or self._driver is None:
            flags[index] = value
            return
        address = flags.data_ptr() + index * flags.element_size()
        write = self._driver.cuStreamWriteValue32_v2
        status = write(
            ctypes.c_void_p(self.stream.cuda_stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(value),
            ctypes.c_uint(0),
        )
        if status:
            raise RuntimeError(f"cuStreamWriteValue32 failed with CUDA error {status}")

    def join(self) -> None:
        """The current stream waits for the copies."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def run_ranks(
    device: str, kernels: Sequence[Kernel], given: list[dict[str, Any]], seed: int
) -> None:
    """All ranks at the same time: a stream each, or the executor in the interpreter.

    given: by rank, the arguments of all kernels by name.
    """
    if device == "cpu":
        from msc.testing.interpreter import Executor

        executor = Executor(seed, len(given))
        for rank, values in enumerate(given):
            for kernel in kernels:
                executor.launch(rank, kernel, kernel.pick(values))
        executor.run()
        return
    current = torch.cuda.current_stream()
    streams = [_stream() for _ in given]
    runs = [[launcher(kernel, kernel.pick(values)) for kernel in kernels] for values in given]
    for stream, own in zip(streams, runs, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for run in own:
                run()
    for stream in streams:
        current.wait_stream(stream)


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _empty(make: Make, *shape: int, dtype: torch.dtype) -> Tensor:
    """Filled with NaN, so that what is not written cannot be right."""
    return torch.full(shape, float("nan"), dtype=dtype, device=make.device)


def _addresses(tensors: list[Tensor], device: str) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
