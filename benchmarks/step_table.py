"""The table and the picture of step_time.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def table(results: list[Result]) -> str:
    """A line per candidate: milliseconds, spread, multiples of eager, the peer and the floor."""
    lines = [
        f"{'model':<7}{'mesh':<10}{'candidate':<14}{'ms':>8}{'min':>8}{'max':>8}{'cpu':>8}"
        f"{'x eager':>9}{'x peer':>8}{'x floor':>9}"
    ]
    for result in results:
        eager = statistics.median(result["seconds"]["eager"])
        peer = statistics.median(result["seconds"][result["peer"]])
        least = sum(result["floor"].values())
        start = f"{result['model']:<7}{result['group']:<10}"
        for name, times in result["seconds"].items():
            typical = statistics.median(times)
            cpu = statistics.median(result["cpu_seconds"][name])
            milliseconds = (typical, min(times), max(times), cpu)
            lines.append(
                f"{start}{name:<14}"
                + "".join(f"{1000 * value:>8.1f}" for value in milliseconds)
                + f"{typical / eager:>9.3f}{typical / peer:>8.3f}{typical / least:>9.3f}"
            )
        parts = ", ".join(f"{name} {1000 * t:.1f}" for name, t in result["floor"].items() if t)
        lines.append(
            f"{start}{'floor':<14}{1000 * least:>8.1f}{'':>24}{least / eager:>9.3f}"
            f"{least / peer:>8.3f}{1:>9.3f}  ({parts})"
        )
    return "\n".join(lines)


def draw(results: list[Result], file: Path) -> None:
    """Bars as multiples of eager, with the floor as a line; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(3.2 * len(results), 4.5), layout="constrained")
    for result, axes in zip(
        results, figure.subplots(1, len(results), squeeze=False)[0], strict=True
    ):
        eager = statistics.median(result["seconds"]["eager"])
        heights = {n: statistics.median(t) / eager for n, t in result["seconds"].items()}
        axes.bar(list(heights), list(heights.values()))
        axes.axhline(sum(result["floor"].values()) / eager, color="black", label="floor")
        axes.set_title(f"{result['model']}, {result['group']}")
        axes.tick_params(axis="x", rotation=60)
        axes.legend()
    figure.supylabel("step time, multiples of eager on one rank")
    figure.savefig(file, dpi=120)
