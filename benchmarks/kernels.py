"""Compile every kernel ahead of time, without a GPU, and report what the compiler made of it.

    make kernels                                   all of them, for sm_80 and sm_90
    python -m benchmarks.kernels --only gather     those with "gather" in their name
    python -m benchmarks.kernels --sources out     also writes the source of each, to be read

Writes `kernels.json`: registers, spills, shared memory against the device's limit, wgmma in the
machine code, wrong orderings in the PTX, seconds; and `kernels.sha256`, a digest of the sources
that it is of, so that a test knows when it is out of date. Exits with 1 if a kernel spills, exceeds
its shared memory, has no wgmma on sm_90 though it multiplies matrices, or orders memory wrongly.

No kernel has run on a GPU: this says that they fit, not that they are fast.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from msc.codegen.kernels.ahead_of_time import Report, compile_kernel
from msc.codegen.kernels.catalogue import kernels
from msc.codegen.kernels.description import TARGETS, Kernel

RESULTS = Path(__file__).parent / "results"


def selected(only: Sequence[str]) -> list[Kernel]:
    """Kernels of all targets whose name, with its target, has one of the texts in it; or all."""
    found = [kernel for target in TARGETS for kernel in kernels(target)]
    names = [f"{kernel.name} {kernel.target.name}" for kernel in found]
    return [
        kernel
        for kernel, name in zip(found, names, strict=True)
        if not only or any(text in name for text in only)
    ]


def compile_all(chosen: Sequence[Kernel], processes: int) -> list[Report]:
    """The reports, in order."""
    if processes == 1:
        return [compile_kernel(kernel) for kernel in chosen]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        return list(pool.map(compile_kernel, chosen, chunksize=4))


def digest(chosen: Sequence[Kernel]) -> str:
    """Of everything that the compiler is given: sources, arguments, warps and stages."""
    given = [(k.name, k.target.name, k.source, k.arguments, k.warps, k.stages) for k in chosen]
    return hashlib.sha256(repr(given).encode()).hexdigest()


def show(reports: Sequence[Report]) -> None:
    """Print the reports as a table, and the faults."""
    table = Table(title="Kernels, compiled ahead of time; none has run on a GPU")
    for column in ("kernel", "target"):
        table.add_column(column)
    for column in ("registers", "spills", "shared", "of", "wgmma", "s"):
        table.add_column(column, justify="right")
    for report in reports:
        numbers = (report.registers, report.spills, report.shared, report.shared_limit)
        wgmma = "yes" if report.wgmma else "no" if report.matrix else ""
        table.add_row(
            report.name, report.target, *map(str, numbers), wgmma, f"{report.compile_s:.2f}"
        )
    console = Console(width=150)
    console.print(table)
    for report in reports:
        for fault in report.faults():
            console.print(f"{report.name} ({report.target}): {fault}", markup=False)


def main() -> int:
    """Command line: 0 if no kernel has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--sources", type=Path, help="folder for the sources")
    options = parser.parse_args()
    # decided when Triton is first imported, here or in a process that is started from here
    os.environ.pop("TRITON_INTERPRET", None)
    chosen = selected(options.only)
    if options.sources:
        for kernel in chosen:
            folder = options.sources / kernel.target.name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{kernel.name}.py").write_text(kernel.source)
    reports = compile_all(chosen, options.processes)
    show(reports)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "kernels.json"
    path.write_text(json.dumps({"kernels": [report.row() for report in reports]}, indent=1) + "\n")
    path.with_suffix(".sha256").write_text(digest(chosen) + "\n")
    print(f"wrote {path}")
    return int(any(report.faults() for report in reports))


if __name__ == "__main__":
    raise SystemExit(main())
