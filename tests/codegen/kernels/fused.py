"""Calls of fused kernels on virtual ranks: buffers, flags and copies as a host sets them up."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.codegen.kernels import gather_gemm, gather_weight_gradient, gemm_scatter
from msc.codegen.kernels.description import Kernel
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gather_weight_gradient import GatherWeightGradient
from msc.codegen.kernels.gemm_scatter import GemmScatter
from msc.codegen.kernels.protocol import Chunks, buffer_of
from msc.testing.interpreter import Executor
from msc.testing.interpreter.copy_engine import CopyEngine
from msc.testing.interpreter.tasks import Launch

Mutation = Callable[[list[Kernel]], list[Kernel]]


def unchanged(kernels: list[Kernel]) -> list[Kernel]:
    return kernels


def replaced(old: str, new: str) -> Mutation:
    """A mutation of the text of kernels, of which one must have the old text."""

    def mutate(kernels: list[Kernel]) -> list[Kernel]:
        assert any(old in kernel.source for kernel in kernels), f"{old!r} is in no kernel"
        return [
            dataclasses.replace(kernel, source=kernel.source.replace(old, new))
            for kernel in kernels
        ]

    return mutate


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite for NaN."""
    relative = float((found.double() - expected).norm() / expected.norm())
    return float("inf") if math.isnan(relative) else relative


@dataclass(frozen=True)
class Calls:
    """How a fused kernel is called, and how the host may be mistaken about it."""

    seed: int
    count: int = 1
    resident: int | None = None
    mutate: Mutation = unchanged
    want_more: int = 0
    turn: Callable[[int], int] = buffer_of


Results = list[tuple[Tensor, Tensor]]
"""What a kernel wrote, and what it should have written, in float64."""

Random = Callable[..., Tensor]
Operands = Callable[[Random, Tensor], tuple[dict[str, Tensor], Results]]
"""From a source of random tensors and the gathered rows: the other arguments, the results."""


def run_gather(gather: GatherGemm, calls: Calls) -> float:
    """The largest error of all results of all calls on all ranks."""
    dtype = getattr(torch, gather.dtype)

    def operands(random: Random, rows: Tensor) -> tuple[dict[str, Tensor], Results]:
        values: dict[str, Tensor] = {}
        results: Results = []
        for number, width in enumerate(gather.widths):
            suffix = f"_{number}" if len(gather.widths) > 1 else ""
            b, c = random(width, gather.k), poisoned(gather.m, width, dtype=dtype)
            stored = b if gather.b_layout == "nk" else b.t().contiguous()
            values |= {f"b{suffix}": stored, f"c{suffix}": c}
            results.append((c, rows @ b.double().t()))
        return values, results

    (kernel,) = calls.mutate([gather_gemm.emit(gather)])
    return _run_gathered(kernel, gather.chunks, (gather.k, dtype), "a", operands, calls)


def run_weight_gradient(gradient: GatherWeightGradient, calls: Calls) -> float:
    """The same for a weight gradient, whichever of its factors is gathered."""
    dtype = getattr(torch, gradient.dtype)
    gathered_x = gradient.gathered == "x"
    own, other = (gradient.k, gradient.n) if gathered_x else (gradient.n, gradient.k)

    def operands(random: Random, rows: Tensor) -> tuple[dict[str, Tensor], Results]:
        factor = random(gradient.m, other)
        dw = poisoned(gradient.n, gradient.k, dtype=dtype)
        dy, x = (factor.double(), rows) if gathered_x else (rows, factor.double())
        return {"dy" if gathered_x else "x": factor, "dw": dw}, [(dw, dy.t() @ x)]

    (kernel,) = calls.mutate([gather_weight_gradient.emit(gradient)])
    row = (own, dtype)
    return _run_gathered(kernel, gradient.chunks, row, gradient.gathered, operands, calls)


def _run_gathered(
    kernel: Kernel,
    chunks: Chunks,
    row: tuple[int, torch.dtype],
    name: str,
    operands: Operands,
    calls: Calls,
) -> float:
    """Gathers rows of a length and dtype into the argument `name` of the kernel."""
    length, dtype = row
    ranks = chunks.ranks
    executor = Executor(calls.seed, ranks, calls.resident)
    generator = torch.Generator().manual_seed(calls.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # both buffers of every rank, and for each rank its flags and the announcements of the others
    buffers = [[poisoned(chunks.rows, length, dtype=dtype) for _ in range(2)] for _ in range(ranks)]
    flags = [torch.zeros(chunks.flags, dtype=torch.int32) for _ in range(ranks)]
    announced = [torch.zeros(ranks, dtype=torch.int32) for _ in range(ranks)]
    launches: list[list[Launch]] = [[] for _ in range(ranks)]
    results: Results = []
    for call in range(1, calls.count + 1):
        shards = [random(chunks.chunk, length) for _ in range(ranks)]
        for rank in range(ranks):
            values, own = operands(random, torch.cat(shards).double())
            results += own
            buffer = buffers[rank][calls.turn(call)]
            write = functools.partial(
                announce,
                call=call,
                rank=rank,
                shard=shards[rank],
                buffer=buffer,
                announced=announced,
            )
            executor.copies(rank, "producer", write)
            known = {"flags": flags[rank], "rank": rank, "want": call + calls.want_more}
            arguments = {name: buffer, **values, **known}
            launches[rank].append(executor.launch(rank, kernel, arguments))
    for rank in range(ranks):
        pull = functools.partial(
            pull_shards,
            rank=rank,
            chunks=chunks,
            calls=calls,
            buffers=buffers,
            announced=announced[rank],
            flags=flags[rank],
            launches=launches[rank],
        )
        executor.engine(rank, "copies", pull)
    executor.run()
    return max(error(found, wanted) for found, wanted in results)


def announce(
    engine: CopyEngine, call: int, rank: int, shard: Tensor, buffer: Tensor, announced: list[Tensor]
) -> None:
    """What comes before the kernel in its stream: writes this rank's rows and tells the others."""
    rows = shard.shape[0]
    engine.copy(buffer[rank * rows : (rank + 1) * rows], shard)
    for other in announced:
        engine.signal(other, rank, call)


def pull_shards(
    engine: CopyEngine,
    rank: int,
    chunks: Chunks,
    calls: Calls,
    buffers: list[list[Tensor]],
    announced: Tensor,
    flags: Tensor,
    launches: list[Launch],
) -> None:
    """The second stream: pulls the shards of the next ranks, in the order the kernel reads them."""
    for call in range(1, calls.count + 1):
        turn = calls.turn(call)
        if call > 2:
            engine.wait_launch(launches[call - 3])  # it read this buffer
        for step in range(1, chunks.ranks):
            source = (rank + step) % chunks.ranks
            engine.wait(announced, source, call)
            for part in range(chunks.splits):
                first = source * chunks.chunk + part * chunks.part
                last = min(first + chunks.part, (source + 1) * chunks.chunk)
                engine.copy(buffers[rank][turn][first:last], buffers[source][turn][first:last])
                engine.signal(flags, source * chunks.splits + part, call)


def run_scatter(
    scatter: GemmScatter,
    calls: Calls,
    counter_turn: Callable[[int], int] = buffer_of,
    want: Callable[[int, int], int] = gemm_scatter.want,
    data_seed: int = 0,
) -> tuple[float, list[Tensor]]:
    """The largest error of all calls on all ranks, and the results themselves."""
    ranks, chunk = scatter.ranks, scatter.chunks.chunk
    dtype = getattr(torch, scatter.dtype)
    staged = getattr(torch, scatter.staged or scatter.dtype)
    kernels = calls.mutate([gemm_scatter.emit(scatter), gemm_scatter.emit_sum(scatter)])
    executor = Executor(calls.seed, ranks, calls.resident)
    generator = torch.Generator().manual_seed(data_seed)
    slots = [
        [poisoned(ranks, chunk, scatter.n, dtype=staged) for _ in range(ranks)] for _ in range(2)
    ]
    counters = [
        [torch.zeros(scatter.counters, dtype=torch.int32) for _ in range(ranks)] for _ in range(2)
    ]
    results: Results = []
    for call in range(1, calls.count + 1):
        slot, counter = calls.turn(call), counter_turn(call)
        factors = [
            (
                torch.randn(scatter.m, scatter.k, generator=generator).to(dtype),
                torch.randn(scatter.n, scatter.k, generator=generator).to(dtype),
            )
            for _ in range(ranks)
        ]
        shape = (scatter.n,) if scatter.add == "bias" else (scatter.m, scatter.n)
        added = [torch.randn(shape, generator=generator).to(dtype) for _ in range(ranks)]
        total = sum(a.double() @ b.double().t() for a, b in factors)
        assert isinstance(total, Tensor)
        if scatter.add:
            total = total + sum(own.double() for own in added)
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
                "want": want(ranks, call) + calls.want_more,
                **({scatter.add: added[rank]} if scatter.add else {}),
            }
            for kernel in kernels:
                executor.launch(rank, kernel, kernel.pick(values))
    executor.run()
    return max(error(c, wanted) for c, wanted in results), [c for c, _ in results]
