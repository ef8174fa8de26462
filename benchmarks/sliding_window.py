"""Time and memory of sliding-window attention against sequence and window, forward and backward.

    python benchmarks/sliding_window.py          # a table; results/sliding_window.{json,png}
    python benchmarks/sliding_window.py --quick  # shorter sequences, one round

One sample of 4 heads of 64, float32, one thread. `dense` is causal attention without a window, on
PyTorch's flash kernel; `masked` is PyTorch's attention with a window as its mask, which computes
all scores. Candidates of a length take turns, so that all of them meet the same moments of the
machine; times are processor seconds, medians over the rounds. Memory is the peak of what the CPU
allocator hands out during forward and backward, as the profiler records it: the kernels' own
buffers are in it, the operands not. Slopes are exponents: of time and memory in the length at a
fixed window (1 where the cost of a token is constant, 2 where it grows with the length), fitted
from 4 windows on; and in the window at the longest sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/sliding_window.py`

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import msc.ir.ops  # noqa: E402, F401  (registers torch.ops.msc)
from benchmarks.hardware import hardware  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
WINDOWS = (256, 512, 1024)
LONGEST_MASKED = 8192
"""The mask of a longer sequence takes a gigabyte."""
HEADS, HEAD_SIZE = 4, 64
MIB = 2**20

Run = Callable[[Sequence[Tensor]], Tensor]
Result = dict[str, Any]


def windowed(window: int) -> Run:
    """`msc.attention`, causal; 0 for no window."""
    return lambda qkv: torch.ops.msc.attention(*qkv, None, HEAD_SIZE**-0.5, True, window)[0]


def masked(window: int) -> Run:
    """Dense attention with a mask, as models write a window."""

    def run(qkv: Sequence[Tensor]) -> Tensor:
        q, k, v = qkv
        s = q.shape[2]
        ones = torch.ones(s, s, dtype=torch.bool)
        band = ones.tril().logical_and_(ones.triu(1 - window))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=band)

    return run


def candidates(length: int) -> dict[str, Run]:
    """What is measured at a length."""
    found = {"dense": windowed(0)} | {f"w={w}": windowed(w) for w in WINDOWS if w < length}
    return found | ({"masked": masked(WINDOWS[0])} if length <= LONGEST_MASKED else {})


def measure(length: int, rounds: int) -> Result:
    """Processor seconds of each round, and peak bytes, of each candidate."""
    generator = torch.Generator().manual_seed(length)
    shape = (1, length, HEADS, HEAD_SIZE)
    q, k, v, gy = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4))
    qkv = [x.requires_grad_() for x in (q, k, v)]

    def step(run: Run) -> None:
        torch.autograd.grad(run(qkv), qkv, gy)

    runs = candidates(length)
    peaks = {name: peak_bytes(partial(step, run)) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            step(run)
            seconds[name].append(time.process_time() - start)
    return {"length": length, "cpu_seconds": seconds, "peak_bytes": peaks}


def peak_bytes(work: Callable[[], None]) -> int:
    """The most bytes that the CPU allocator holds for `work` at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """The slope of costs over sizes, both as logarithms; None for less than two points."""
    if len(sizes) < 2:
        return None
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def cost(result: Result, name: str, what: str) -> float:
    """Median seconds, or peak bytes, of a candidate."""
    found = result[what][name]
    return statistics.median(found) if isinstance(found, list) else float(found)


def slopes(results: list[Result]) -> dict[str, dict[str, float | None]]:
    """Exponents of time and memory: in the length, and in the window at the last length."""
    found: dict[str, dict[str, float | None]] = {}
    for name in results[-1]["cpu_seconds"] | results[0]["cpu_seconds"]:
        least = 4 * int(name[2:]) if name.startswith("w=") else 4 * WINDOWS[0]
        own = [r for r in results if name in r["cpu_seconds"] and r["length"] >= least]
        sizes = [r["length"] for r in own]
        found[f"{name}, in length"] = {
            what: exponent(sizes, [cost(r, name, what) for r in own])
            for what in ("cpu_seconds", "peak_bytes")
        }
    last = results[-1]
    widths = [w for w in WINDOWS if f"w={w}" in last["cpu_seconds"]]
    found[f"in window at {last['length']}"] = {
        what: exponent(widths, [cost(last, f"w={w}", what) for w in widths])
        for what in ("cpu_seconds", "peak_bytes")
    }
    return found


def table(results: list[Result]) -> str:
    """A line per length and candidate, with ratios to dense attention."""
    lines = [f"{'length':>7} {'attention':<10}{'cpu ms':>9}{'/dense':>8}{'MiB':>9}{'/dense':>8}"]
    for result in results:
        for name in result["cpu_seconds"]:
            columns = ""
            for what, unit in (("cpu_seconds", 1e-3), ("peak_bytes", MIB)):
                own, dense = cost(result, name, what), cost(result, "dense", what)
                columns += f"{own / unit:>9.1f}{own / dense:>8.3f}"
            lines.append(f"{result['length']:>7} {name:<10}{columns}")
    lines.append(f"\n{'exponent':<24}{'time':>7}{'memory':>8}")
    for name, found in slopes(results).items():
        shown = ["-" if value is None else f"{value:.2f}" for value in found.values()]
        lines.append(f"{name:<24}{shown[0]:>7}{shown[1]:>8}")
    return "\n".join(lines)


def draw(results: list[Result], file: Path) -> None:
    """Time and memory over the length, both on logarithmic axes; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    names = list(results[-1]["cpu_seconds"] | results[0]["cpu_seconds"])
    titles = (("cpu_seconds", 1, "processor seconds"), ("peak_bytes", MIB, "peak MiB"))
    for axes, (what, unit, label) in zip(figure.subplots(1, 2), titles, strict=True):
        for name in names:
            own = [r for r in results if name in r["cpu_seconds"]]
            style = "o-" if name.startswith("w=") else "s--"
            axes.plot(
                [r["length"] for r in own],
                [cost(r, name, what) / unit for r in own],
                style,
                label=name if name != "masked" else f"masked, w={WINDOWS[0]}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("sequence length")
        axes.set_ylabel(label)
        axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.suptitle(f"Attention forward and backward, {HEADS} heads of {HEAD_SIZE}, one thread")
    figure.savefig(file, dpi=120)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="up to 4096 tokens, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and PNG")
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    lengths = [s for s in LENGTHS if s <= 4096] if options.quick else list(LENGTHS)
    results = [measure(length, 1 if options.quick else options.rounds) for length in lengths]
    load.append(os.getloadavg()[0])
    print(table(results))
    print(f"\nload average of the machine before and after: {load[0]:.1f}, {load[1]:.1f}")
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "hardware": hardware(),
        "load_average": load,
        "threads": 1,
        "dtype": "float32",
        "heads": HEADS,
        "head_size": HEAD_SIZE,
        "masked_window": WINDOWS[0],
        "results": results,
        "exponents": slopes(results),
    }
    (options.out / "sliding_window.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(results, options.out / "sliding_window.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
