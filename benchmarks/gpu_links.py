"""Fused kernels beside a link that one device can offer, for `gpu_check`.

PCIe is a real one: a copy engine brings shards from pinned host memory, and tiles are stored
straight into it. NVLink is only stood in for: copies inside the device's memory, each of which ends
when a link of so many GB/s would have brought it. That shows what is hidden at such a rate, not
NVLink, its latency, or ranks that are not in step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import Case, Make, Sizes
from benchmarks.gpu_kernels import launcher, shapes_of, target_of, tiles_of
from benchmarks.gpu_ranks import addresses, empty, new_stream, part_of
from benchmarks.gpu_references import linear_float64
from benchmarks.gpu_spin import Pace
from msc.codegen.kernels import gather_gemm, gemm_scatter
from msc.codegen.kernels.description import Target
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gemm_scatter import GemmScatter
from msc.runtime.fused_kernels import stream_memory

NVLINK_RATES = (150, 300, 450)
"""GB/s one way of the stand-in: of an H100's NVLink, 450 is the peak (NVIDIA's data sheet)."""


def link_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """GEMMs with a gather or a scatter over PCIe in one kernel, then a gather over the stand-in.

    `ratio` is over both one after the other; the report tells how much of the shorter was hidden.
    """
    if dtype != torch.bfloat16:
        return
    for m, n, k in shapes_of(sizes).pcie:
        yield _case(f"gather_gemm over PCIe, n={n}", PcieGather(make, m, n, k, dtype))
    m, n, k = shapes_of(sizes).pcie[0]
    yield _case(f"gemm_scatter over PCIe, n={n}", PcieScatter(make, m, k, n, dtype))
    for rate in NVLINK_RATES:
        made = PacedGather(make, m, n, k, dtype, rate)
        yield _case(f"gather_gemm, copies paced to {rate} GB/s", made)


def _case(name: str, made: Gather | PcieScatter) -> Case:
    def serial() -> None:
        made.transfer()
        made.product()

    return Case(
        f"kernel {name}",
        made.fused,
        made.expected,
        serial,
        made.flops,
        "TFLOP/s",
        torch.bfloat16,
        parts=(made.transfer, made.product),
    )


class Link:
    """A stream of copies beside the current one. On the CPU everything happens in order."""

    def __init__(self, device: str) -> None:
        self.stream = new_stream() if device == "cuda" else None

    def beside(self) -> Any:
        """What is issued inside runs on the second stream, after what the current one has now."""
        if self.stream is None:
            return torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def write(self, flags: Tensor, index: int, value: int) -> None:
        """flags[index] = value when everything before it in the stream is done, by no kernel."""
        if self.stream is None:
            flags[index] = value
        else:
            stream_memory.write(flags, index, value)

    def join(self) -> None:
        """The current stream waits for the copies."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


class Gather:
    """c[m, n] = a[m, k] @ b.T, where all rows of a but the first rank's come over a link.

    bring: copies these rows of `source` into `a`, on the current stream.
    """

    def __init__(
        self, make: Make, m: int, n: int, k: int, dtype: torch.dtype, target: Target
    ) -> None:
        self.ranks = 8 if m > 64 else 2
        made = GatherGemm(m, k, (n,), self.ranks, "bfloat16", target, tiles_of(make, target))
        self.kernel = gather_gemm.emit(made)
        self.chunk = made.chunks.chunk
        self.a, self.b = make.normal(m, k, dtype=dtype), make.normal(n, k, dtype=dtype)
        self.c = empty(make, m, n, dtype=dtype)
        self.source = self.a.clone()
        self.flags = torch.zeros(self.ranks, dtype=torch.int32, device=make.device)
        self.link = Link(make.device)
        self.call = 0
        self.flops = 2.0 * m * n * k

    def bring(self, rows: slice) -> None:
        """See the class."""
        self.a[rows].copy_(self.source[rows], non_blocking=True)

    def fused(self) -> Tensor:
        """Copies on a second stream, each with its flag, while the kernel runs."""
        self.call += 1
        with self.link.beside():
            for source in range(1, self.ranks):
                self.bring(self._rows(source))
                self.link.write(self.flags, source, self.call)
        self._launch(self.call)
        self.link.join()
        return self.c

    def transfer(self) -> None:
        """The same copies alone."""
        for source in range(1, self.ranks):
            self.bring(self._rows(source))

    def product(self) -> None:
        """The same product alone, by torch."""
        torch.mm(self.a, self.b.t(), out=self.c)

    def expected(self) -> Tensor:
        """In float64."""
        return linear_float64(self.a, self.b)

    def _rows(self, source: int) -> slice:
        return slice(source * self.chunk, (source + 1) * self.chunk)

    def _launch(self, want: int) -> None:
        known = {"flags": self.flags, "rank": 0, "want": want}
        launcher(self.kernel, {"a": self.a, "b": self.b, "c": self.c, **known})()


class PcieGather(Gather):
    """The shards lie in pinned host memory, and a copy engine brings them."""

    def __init__(self, make: Make, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__(make, m, n, k, dtype, target_of(make))
        if make.device == "cuda":
            self.source = self.source.cpu().pin_memory()


class PacedGather(Gather):
    """The shards lie in the same memory; a copy of them lasts as long as a link of `rate` GB/s.

    Such copies may take processors, so some are left to them, and `product` is the same kernel with
    all rows there, on as many processors.
    """

    def __init__(self, make: Make, m: int, n: int, k: int, dtype: torch.dtype, rate: float) -> None:
        super().__init__(make, m, n, k, dtype, part_of(target_of(make), 1))
        nanoseconds = round(self.chunk * k * self.a.element_size() / rate)
        self._pace: Callable[[Callable[[], None]], None] = Pace(make.device, nanoseconds)

    def bring(self, rows: slice) -> None:
        """In no less than its time."""
        self._pace(lambda: super(PacedGather, self).bring(rows))

    def product(self) -> None:
        """The kernel finds all flags raised."""
        self._launch(self.call)


class PcieScatter:
    """a[m, k] @ b.T, the tiles of other ranks' rows stored into host memory over PCIe.

    They are the slots of rank 0 on all ranks; what others would send does not come, so nothing is
    summed. Counters lie in the device's memory.
    """

    def __init__(self, make: Make, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.ranks = 8 if m > 64 else 2
        target = target_of(make)
        tiles = dataclasses.replace(tiles_of(make, target), parts=1, stages=3)
        made = GemmScatter(m, n, k, self.ranks, "bfloat16", target, tiles)
        self.kernel = gemm_scatter.emit(made)
        self.chunk = made.chunks.chunk
        self.a, self.b = make.normal(m, k, dtype=dtype), make.normal(n, k, dtype=dtype)
        self.c = empty(make, m, n, dtype=dtype)
        shape = (self.ranks, self.chunk, n)
        host = [torch.zeros(*shape, dtype=dtype) for _ in range(self.ranks - 1)]
        if make.device == "cuda":
            host = [slots.pin_memory() for slots in host]
        self.slots = [torch.zeros(*shape, dtype=dtype, device=make.device), *host]
        self.counters = [
            torch.zeros(made.counters, dtype=torch.int32, device=make.device)
            for _ in range(self.ranks)
        ]
        tables = [addresses(each, make.device) for each in (self.slots, self.counters)]
        self.values = {"a": self.a, "b": self.b, "rank": 0}
        self.values |= {"slots_of": tables[0], "counters_of": tables[1]}
        self.flops = 2.0 * m * n * k

    def fused(self) -> list[Tensor]:
        """The kernel alone: it stores every tile where its owner reads it."""
        launcher(self.kernel, self.kernel.pick(self.values))()
        if self.a.is_cuda:
            return [slots[0] for slots in self.slots]
        return [slots[0].clone() for slots in self.slots]

    def transfer(self) -> None:
        """As many bytes by a copy engine."""
        for rank in range(1, self.ranks):
            rows = slice(rank * self.chunk, (rank + 1) * self.chunk)
            self.slots[rank][0].copy_(self.c[rows], non_blocking=True)

    def product(self) -> None:
        """The same product alone, by torch."""
        torch.mm(self.a, self.b.t(), out=self.c)

    def expected(self) -> list[Tensor]:
        """In float64, by owner of the rows."""
        return list(torch.split(linear_float64(self.a, self.b), self.chunk))
