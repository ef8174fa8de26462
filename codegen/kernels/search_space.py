"""Which tiles an autotuner may try on a device: those that the compiler's report allows.

Compiling takes half a second and no device; a configuration that spills or does not fit is not
worth a measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from msc.codegen.kernels.ahead_of_time import Report, compile_kernel
from msc.codegen.kernels.description import BYTES, Kernel, Target, Tiles


@dataclass(frozen=True)
class Pruned:
    """usable: kernels to measure, with their reports. rejected: what is wrong with each other."""

    usable: list[tuple[Tiles, Kernel, Report]]
    rejected: dict[Tiles, list[str]]


def candidates(target: Target, dtype: str) -> Iterator[Tiles]:
    """Tiles of a matrix product whose operand blocks alone fit into shared memory."""
    sizes = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5))
    parts = (1, 2) if target.has_tensor_memory_accelerator else (1,)
    for (m, n, k, warps, stages), pieces in itertools.product(sizes, parts):
        blocks = (m + n) * k * stages * BYTES[dtype]
        # an accumulator of more than 128 registers a thread leaves too few for the rest
        if blocks <= target.shared_limit and m * n <= 128 * 32 * warps:
            yield Tiles(m, n, k, warps=warps, stages=stages, parts=pieces)


def prune(emit: Callable[[Tiles], Kernel], tiles: Iterable[Tiles]) -> Pruned:
    """Compile the kernel with each of the tiles, and keep those without a fault."""
    pruned = Pruned([], {})
    for choice in tiles:
        kernel = emit(choice)
        report = compile_kernel(kernel)
        if faults := report.faults():
            pruned.rejected[choice] = faults
        else:
            pruned.usable.append((choice, kernel, report))
    return pruned
