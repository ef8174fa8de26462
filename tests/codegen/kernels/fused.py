"""Calls of fused kernels on virtual ranks: buffers, flags and copy engines as a host sets them up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from msc.codegen.kernels import gather_gemm, gemm_scatter
from msc.codegen.kernels.description import Kernel
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gemm_scatter import GemmScatter
from msc.codegen.kernels.protocol import buffer_of
from msc.testing.interpreter import Executor
from msc.testing.interpreter.executor import CopyEngine, Launch

Mutation = Callable[[Kernel], Kernel]


def unchanged(kernel: Kernel) -> Kernel:
    return kernel


def replaced(old: str, new: str) -> Mutation:
    """A mutation of the kernel's text, which must have the old text."""

    def mutate(kernel: Kernel) -> Kernel:
        assert old in kernel.source, f"{old!r} is not in the kernel"
        return dataclasses.replace(kernel, source=kernel.source.replace(old, new))

    return mutate


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite for NaN."""
    relative = float((found.double() - expected).norm() / expected.norm())
    return float("inf") if math.isnan(relative) else relative


def run_gather(
    gather: GatherGemm,
    seed: int,
    calls: int = 1,
    mutate: Mutation = unchanged,
    resident: int | None = None,
    want_more: int = 0,
    turn: Callable[[int], int] = buffer_of,
) -> float:
    """The largest error of all results of all calls on all ranks."""
    ranks, chunks = gather.ranks, gather.chunks
    dtype = getattr(torch, gather.dtype)
    kernel = mutate(gather_gemm.emit(gather))
    executor = Executor(seed, ranks, resident)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    several = len(gather.widths) > 1
    shards = [[random(chunks.chunk, gather.k) for _ in range(ranks)] for _ in range(calls)]
    # both buffers of every rank, and for each its flags and the announcements of the others
    buffers = [
        [poisoned(gather.m, gather.k, dtype=dtype) for _ in range(2)] for _ in range(ranks)
    ]
    flags = [torch.zeros(chunks.flags, dtype=torch.int32) for _ in range(ranks)]
    announced = [torch.zeros(ranks, dtype=torch.int32) for _ in range(ranks)]
    outputs: list[list[list[tuple[Tensor, Tensor]]]] = []
    launches: list[list[Launch]] = [[] for _ in range(ranks)]
    for call in range(1, calls + 1):
        own: list[list[tuple[Tensor, Tensor]]] = []
        for rank in range(ranks):
            buffer = buffers[rank][turn(call)]
            values = {"a": buffer, "flags": flags[rank], "rank": rank, "want": call + want_more}
            results: list[tuple[Tensor, Tensor]] = []
            whole = torch.cat(shards[call - 1]).double()
            for number, width in enumerate(gather.widths):
                suffix = f"_{number}" if several else ""
                b = random(width, gather.k)
                c = poisoned(gather.m, width, dtype=dtype)
                stored = b if gather.b_layout == "nk" else b.t().contiguous()
                values |= {f"b{suffix}": stored, f"c{suffix}": c}
                results.append((c, whole @ b.double().t()))
            own.append(results)
            given = (call, rank, shards[call - 1][rank], buffer, announced)
            executor.copies(rank, "producer", lambda engine, given=given: announce(engine, *given))
            launches[rank].append(executor.launch(rank, kernel, values))
        outputs.append(own)
    for rank in range(ranks):
        executor.engine(
            rank,
            "copies",
            lambda engine, rank=rank: gather_copies(
                engine, rank, gather, calls, turn, buffers, announced, flags, launches
            ),
        )
    executor.run()
    return max(error(c, wanted) for call in outputs for own in call for c, wanted in own)


def announce(
    engine: CopyEngine, call: int, rank: int, shard: Tensor, buffer: Tensor, announced: list[Tensor]
) -> None:
    """What comes before the kernel in its stream: writes this rank's rows and tells the others."""
    rows = shard.shape[0]
    engine.copy(buffer[rank * rows : (rank + 1) * rows], shard)
    for other in announced:
        engine.signal(other, rank, call)


def gather_copies(
    engine: CopyEngine,
    rank: int,
    gather: GatherGemm,
    calls: int,
    turn: Callable[[int], int],
    buffers: list[list[Tensor]],
    announced: list[Tensor],
    flags: list[Tensor],
    launches: list[list[Launch]],
) -> None:
    """The second stream: pulls the shards of the next ranks, in the order the kernel reads them."""
    chunks = gather.chunks
    for call in range(1, calls + 1):
        if call > 2:
            engine.wait_launch(launches[rank][call - 3])  # it read this buffer
        for step in range(1, gather.ranks):
            source = (rank + step) % gather.ranks
            engine.wait(announced[rank], source, call)
            for part in range(chunks.splits):
                first = source * chunks.chunk + part * chunks.part
                last = min(first + chunks.part, (source + 1) * chunks.chunk)
                here = buffers[rank][turn(call)][first:last]
                engine.copy(here, buffers[source][turn(call)][first:last])
                engine.signal(flags[rank], source * chunks.splits + part, call)


def run_scatter(
    scatter: GemmScatter,
    seed: int,
    calls: int = 1,
    mutate: Mutation = unchanged,
    resident: int | None = None,
    want_more: int = 0,
    slot_turn: Callable[[int], int] = buffer_of,
    counter_turn: Callable[[int], int] = buffer_of,
    want: Callable[[int, int], int] = gemm_scatter.want,
    data_seed: int = 0,
) -> tuple[float, list[Tensor]]:
    """The largest error of all calls on all ranks, and the results themselves."""
    ranks, chunk = scatter.ranks, scatter.chunks.chunk
    dtype = getattr(torch, scatter.dtype)
    staged = getattr(torch, scatter.staged or scatter.dtype)
    kernel = mutate(gemm_scatter.emit(scatter))
    executor = Executor(seed, ranks, resident)
    generator = torch.Generator().manual_seed(data_seed)
    slots = [
        [poisoned(ranks, chunk, scatter.n, dtype=staged) for _ in range(ranks)] for _ in range(2)
    ]
    counters = [
        [torch.zeros(scatter.counters, dtype=torch.int32) for _ in range(ranks)] for _ in range(2)
    ]
    results: list[tuple[Tensor, Tensor]] = []
    for call in range(1, calls + 1):
        slot, counter = slot_turn(call), counter_turn(call)
        factors = [
            (
                torch.randn(scatter.m, scatter.k, generator=generator).to(dtype),
                torch.randn(scatter.n, scatter.k, generator=generator).to(dtype),
            )
            for _ in range(ranks)
        ]
        total = sum(a.double() @ b.double().t() for a, b in factors)
        assert isinstance(total, Tensor)
        for rank, (a, b) in enumerate(factors):
            c = poisoned(chunk, scatter.n, dtype=dtype)
            results.append((c, total[rank * chunk : (rank + 1) * chunk]))
            values = {
                "a": a,
                "b": b if scatter.b_layout == "nk" else b.t().contiguous(),
                "c": c,
                "slots": slots[slot][rank],
                "slots_of": addresses(slots[slot]),
                "counters": counters[counter][rank],
                "counters_of": addresses(counters[counter]),
                "rank": rank,
                "want": want(ranks, call) + want_more,
            }
            executor.launch(rank, kernel, values)
    executor.run()
    return max(error(c, wanted) for c, wanted in results), [c for c, _ in results]
