"""Check every opaque op on a CUDA device against float64, and time it beside torch's own op.

    python -m benchmarks.gpu_check               one CUDA device, torch 2.11 or newer, a few minutes
    python -m benchmarks.gpu_check --cpu         tiny sizes on the CPU: tests this script

One line per op: its error against a float64 computation on the same device by other means, its
time, what that makes in TFLOP/s or GB/s, and the time over that of torch's op for the same work
(below 1 is faster). The most important ops come first; what does not fit into `--seconds` is listed
as skipped. Exits with 1 if an op is wrong or fails. Writes `gpu_check_<device>.json`.

Nothing of MSC has run on a GPU yet: the numbers of this script will be the first.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_cases import FAMILIES, LARGE, TINY, Case, Make, Sizes

RESULTS = Path(__file__).parent / "results"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Largest error over the largest value: a few roundings of the dtype's results."""


@dataclass
class Row:
    """What was found about one case; `ratio` is the op's time over that of torch's op."""

    name: str
    dtype: str
    status: str
    error: float | None = None
    milliseconds: float | None = None
    rate: float | None = None
    unit: str = ""
    ratio: float | None = None
    message: str = ""


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
    """Median time of a call, after two that do not count."""
    for _ in range(2):
        run()
    times: list[float] = []
    for _ in range(repeats):
        if device == "cuda":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


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
    except Exception as error:  # one op that fails must not hide the others; it fails the run
        row.status = "failed"
        row.message = f"{type(error).__name__}: {error}"
    return row


def run(device: str, sizes: Sizes, dtypes: Sequence[torch.dtype], seconds: float) -> list[Row]:
    """Check all families in all dtypes until `seconds` have passed."""
    end = time.monotonic() + seconds
    rows: list[Row] = []
    for dtype in dtypes:
        for family in FAMILIES:
            name = family.__name__.removesuffix("_cases")
            if time.monotonic() > end:
                rows.append(Row(name, str(dtype).removeprefix("torch."), "skipped"))
                continue
            try:
                for case in family(Make(device), sizes, dtype):
                    rows.append(check(case, device, 10 if device == "cuda" else 2))
            except Exception as error:  # the operands of a family: report it, go on with the next
                message = f"{type(error).__name__}: {error}"
                rows.append(Row(name, str(dtype).removeprefix("torch."), "failed", message=message))
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


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
    device = "cpu" if options.cpu else "cuda"
    name = "cpu" if options.cpu else torch.cuda.get_device_name()
    dtypes = (torch.bfloat16, torch.float32)
    rows = run(device, TINY if options.cpu else LARGE, dtypes, options.seconds)
    show(rows, f"{name}, torch {torch.__version__}")
    sizes = asdict(TINY if options.cpu else LARGE)
    data = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "sizes": sizes,
        "rows": [asdict(row) for row in rows],
    }
    options.results.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = options.results / f"gpu_check_{slug}.json"
    path.write_text(json.dumps(data, indent=2) + "\n")
    print(f"wrote {path}")
    return int(any(row.status in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
