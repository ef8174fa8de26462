"""Check every opaque op, every Triton kernel and whole steps on a CUDA device, and time them.

    python -m benchmarks.gpu_check               one CUDA device, torch 2.11 or newer, a few minutes
    python -m benchmarks.gpu_check --resume      the same, without the families that the file has
    python -m benchmarks.gpu_check --cpu         tiny sizes on the CPU: tests this script

One line per op or kernel: its error against a float64 computation on the same device by other
means, its time, what that makes in TFLOP/s or GB/s, and the time over that of torch's op for the
same work (below 1 is faster). The most important come first; what does not fit into `--seconds` is
listed as skipped. Kernels of several virtual ranks come last: should they wait for each other for
ever, a watchdog ends the run. Exits with 1 if anything is wrong or fails. Writes
`gpu_check_<device>.json` after every family.

Nothing of MSC has run on a GPU yet: the numbers of this script will be the first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_cases import FAMILIES as OP_FAMILIES
from benchmarks.gpu_cases import LARGE, TINY, Case, Make, Sizes
from benchmarks.gpu_fused import fused_program_cases
from benchmarks.gpu_graphs import graph_cases
from benchmarks.gpu_kernels import attention_kernel_cases, product_kernel_cases
from benchmarks.gpu_links import link_cases
from benchmarks.gpu_programs import program_cases
from benchmarks.gpu_ranks import scatter_rank_cases
from benchmarks.gpu_row_kernels import optimizer_kernel_cases, row_kernel_cases

FAMILIES = (
    product_kernel_cases,
    attention_kernel_cases,
    row_kernel_cases,
    optimizer_kernel_cases,
    program_cases,
    graph_cases,
    *OP_FAMILIES,
    link_cases,
    scatter_rank_cases,
    fused_program_cases,
)
FAMILY_SECONDS = 120
RESULTS = Path(__file__).parent / "results"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest error over the largest value: a few roundings of the dtype's results."""


@dataclass
class Row:
    """What was found about one case; `ratio` is the op's time over that of torch's op.

    family: of the case, and the dtype that it was made for, which are done when the file has them.
    """

    name: str
    dtype: str
    status: str
    error: float | None = None
    milliseconds: float | None = None
    rate: float | None = None
    unit: str = ""
    ratio: float | None = None
    message: str = ""
    family: str = ""


def error_of(found: Any, expected: Any, exact: bool) -> float:
    """The largest difference over the largest value; infinite if shapes differ or NaN appears."""
    lists = [list(x) if isinstance(x, (tuple, list)) else [x] for x in (found, expected)]
    worst = 0.0
    for value, reference in zip(*lists, strict=True):
        if value.shape != reference.shape:
            return math.inf
        difference = value.to(reference.device, torch.float64) - reference.double()
        scale = reference.double().abs().max().clamp_min(1e-30)
        error = float(difference.abs().max() / scale)
        if math.isnan(error) or (exact and error > 0):
            return math.inf
        worst = max(worst, error)
    return worst


def milliseconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Median time of a call, after two that do not count.

    On a device so many calls are timed at once that the work of launching one is hidden.
    """
    measure = _device_milliseconds if device == "cuda" else _host_milliseconds
    measure(run, 1)
    calls = 1
    if device == "cuda":
        calls = max(1, min(50, round(2 / max(measure(run, 1), 0.01))))
    return statistics.median(measure(run, calls) for _ in range(repeats))


def _device_milliseconds(run: Callable[[], Any], calls: int) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls


def _host_milliseconds(run: Callable[[], Any], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return 1000 * (time.perf_counter() - begin) / calls


def check(case: Case, device: str, repeats: int) -> Row:
    """Run one case; an error of the op becomes a row that says so."""
    row = Row(case.name, str(case.dtype).removeprefix("torch."), "ok", unit=case.unit)
    try:
        with torch.no_grad():
            found = case.run()
        row.error = error_of(found, case.expected(), case.exact)
        del found
        if not row.error <= TOLERANCE[case.dtype]:
            row.status = "wrong"
        with torch.no_grad():
            row.milliseconds = milliseconds(case.run, device, repeats)
        row.rate = case.work / row.milliseconds / (1e9 if case.unit == "TFLOP/s" else 1e6)
        if case.rival is not None:
            row.ratio = row.milliseconds / milliseconds(case.rival, device, repeats)
        if case.parts is not None and device == "cuda":
            first, second = (milliseconds(part, device, repeats) for part in case.parts)
            hidden = (first + second - row.milliseconds) / min(first, second)
            row.message = f"{first:.2f} ms beside {second:.2f} ms, {hidden:.0%} hidden"
        if case.note is not None:
            row.message = case.note()
    except Exception as error:  # one op that fails must not hide the others; it fails the run
        row.status = "failed"
        row.message = f"{type(error).__name__}: {error}"
    return row


def run(
    device: str,
    sizes: Sizes,
    dtypes: Sequence[torch.dtype],
    seconds: float,
    save: Callable[[list[Row]], None] = lambda rows: None,
    known: Sequence[Row] = (),
) -> list[Row]:
    """Check all families in all dtypes until `seconds` have passed; `save` after each family.

    known: rows of an earlier run; its families are not checked again.
    """
    end = time.monotonic() + seconds
    rows = list(known)
    done = {row.family for row in known}
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for family in FAMILIES:
            name = family.__name__.removesuffix("_cases")
            if f"{name} {kind}" in done:
                continue
            if time.monotonic() > end:
                rows.append(Row(name, kind, "skipped"))
                continue
            watchdog = threading.Timer(FAMILY_SECONDS, _give_up, (name, kind, rows, save))
            watchdog.start()
            found: list[Row] = []
            try:
                for case in family(Make(device), sizes, dtype):
                    found.append(check(case, device, 10 if device == "cuda" else 2))
            except Exception as error:  # the operands of a family: report it, go on with the next
                found.append(Row(name, kind, "failed", message=f"{type(error).__name__}: {error}"))
            rows += [replace(row, family=f"{name} {kind}") for row in found]
            watchdog.cancel()
            save(rows)
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


def _give_up(name: str, kind: str, rows: list[Row], save: Callable[[list[Row]], None]) -> None:
    """A kernel that waits for ever cannot be ended: keep what is known, and end the process."""
    message = f"no end after {FAMILY_SECONDS} s"
    save([*rows, Row(name, kind, "failed", message=message, family=f"{name} {kind}")])
    print(f"{name}: no end after {FAMILY_SECONDS} s", file=sys.stderr, flush=True)
    os._exit(1)


def earlier(path: Path, sizes: dict[str, Any]) -> list[Row]:
    """What a run with this torch and these sizes has left, without what it had to skip."""
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    if (data["torch"], data["sizes"]) != (torch.__version__, sizes):
        return []
    return [Row(**row) for row in data["rows"] if row["family"]]


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table, and the messages of those that failed."""
    table = Table(title=title)
    for column in ("op", "dtype", "status"):
        table.add_column(column)
    for column in ("error", "ms", "rate", "", "times torch"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            row.dtype,
            row.status,
            "" if row.error is None else f"{row.error:.1e}",
            "" if row.milliseconds is None else f"{row.milliseconds:.3f}",
            "" if row.rate is None else f"{row.rate:.1f}",
            row.unit,
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
    console = Console(width=120)
    console.print(table)
    for row in rows:
        if row.message:
            console.print(f"{row.name} ({row.dtype}): {row.message}", markup=False)


def main() -> int:
    """Command line: 0 if every op that ran is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=420, help="start no family after this")
    parser.add_argument("--resume", action="store_true", help="go on with what the file lacks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print(
            "gpu_check needs a CUDA device, and torch finds none "
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda}). "
            "--cpu runs tiny sizes on the CPU, to test the script.",
            file=sys.stderr,
        )
        return 2
    if options.cpu and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides when it is first imported, which has happened: start again
        os.environ["TRITON_INTERPRET"] = "1"
        arguments = [sys.executable, "-m", "benchmarks.gpu_check", *sys.argv[1:]]
        os.execv(sys.executable, arguments)
    device = "cpu" if options.cpu else "cuda"
    name = "cpu" if options.cpu else torch.cuda.get_device_name()
    dtypes = (torch.bfloat16, torch.float32)
    sizes = TINY if options.cpu else LARGE
    options.results.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = options.results / f"gpu_check_{slug}.json"

    def save(rows: list[Row]) -> None:
        data = {
            "device": name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "sizes": asdict(sizes),
            "rows": [asdict(row) for row in rows],
        }
        path.write_text(json.dumps(data, indent=2) + "\n")

    known = earlier(path, asdict(sizes)) if options.resume else []
    rows = run(device, sizes, dtypes, options.seconds, save, known)
    save(rows)
    show(rows, f"{name}, torch {torch.__version__}")
    print(f"wrote {path}")
    return int(any(row.status in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
