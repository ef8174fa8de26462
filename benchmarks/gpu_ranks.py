"""Fused kernels between virtual ranks on one device, for `gpu_check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import Case, Make, Sizes
from benchmarks.gpu_kernels import launcher, shapes_of, target_of, tiles_of
from benchmarks.gpu_references import linear_float64
from msc.codegen.kernels import gemm_scatter
from msc.codegen.kernels.description import Kernel, Target
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
    slots = [[empty(make, ranks, chunk, n, dtype=dtype) for _ in range(ranks)] for _ in range(2)]
    counters = [
        [torch.zeros(made.counters, dtype=torch.int32, device=make.device) for _ in range(ranks)]
        for _ in range(2)
    ]
    results = [empty(make, chunk, n, dtype=dtype) for _ in range(ranks)]
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
                "slots_of": addresses(slots[turn], make.device),
                "counters": counters[turn][rank],
                "counters_of": addresses(counters[turn], make.device),
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
    streams = [new_stream() for _ in given]
    runs = [[launcher(kernel, kernel.pick(values)) for kernel in kernels] for values in given]
    for stream, own in zip(streams, runs, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for run in own:
                run()
    for stream in streams:
        current.wait_stream(stream)


def new_stream() -> torch.cuda.Stream:
    """A stream beside the current one."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def empty(make: Make, *shape: int, dtype: torch.dtype) -> Tensor:
    """Filled with NaN, so that what is not written cannot be right."""
    return torch.full(shape, float("nan"), dtype=dtype, device=make.device)


def addresses(tensors: list[Tensor], device: str) -> Tensor:
    """A table of where they lie."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
