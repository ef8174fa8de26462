"""The table and the picture of step_time.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def table(results: list[Result]) -> str:
    """A line per candidate: milliseconds, then ratios of medians, of best rounds, of CPU time.

    Medians are the figures to quote. On a machine with other work, the best rounds and the
    processor time say more.
    """
    names = ("x eager", "x peer", "x floor", "best/eager", "best/peer", "best/floor", "cpu/peer")
    lines = [
        f"{'model':<6}{'mesh':<9}{'candidate':<13}{'ms':>8}{'min':>8}{'max':>8}{'cpu':>8}"
        + "".join(f"{name:>11}" for name in names)
    ]
    for result in results:
        start = f"{result['model']:<6}{result['group']:<9}"
        peer = result["peer"]
        for name, times in result["seconds"].items():
            cpu = {n: statistics.median(t) for n, t in result["cpu_seconds"].items()}
            typical = _ratios(result, name, statistics.median)
            best = _ratios(result, name, min)
            shown = (statistics.median(times), min(times), max(times), cpu[name])
            lines.append(
                f"{start}{name:<13}"
                + "".join(f"{1000 * value:>8.1f}" for value in shown)
                + "".join(f"{value:>11.3f}" for value in (*typical, *best, cpu[name] / cpu[peer]))
            )
        parts = ", ".join(f"{name} {1000 * t:.1f}" for name, t in result["floor"].items() if t)
        least = sum(result["floor"].values())
        lines.append(f"{start}{'floor':<13}{1000 * least:>8.1f}  ({parts})")
    return "\n".join(lines)


def _ratios(
    result: Result, name: str, typical: Callable[[list[float]], float]
) -> tuple[float, float, float]:
    """A candidate's time over that of eager, of the peer and of the floor."""
    seconds = {n: typical(times) for n, times in result["seconds"].items()}
    least = dict(result["floor"])
    scale = seconds["eager"] / statistics.median(result["seconds"]["eager"])
    floor = (least["split"] + least["bubble"]) * scale + least["transfers"]
    own = seconds[name]
    return own / seconds["eager"], own / seconds[result["peer"]], own / floor


def draw(results: list[Result], file: Path) -> None:
    """Bars as multiples of eager, with the floor as a line; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    models = list(dict.fromkeys(result["model"] for result in results))
    rows = [[r for r in results if r["model"] == model] for model in models]
    width = max(map(len, rows))
    figure = Figure(figsize=(3.2 * width, 4.2 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), width, squeeze=False)
    for axes in grid.flat[:]:
        axes.set_axis_off()
    for result, axes in (
        pair
        for row, places in zip(rows, grid, strict=True)
        for pair in zip(row, places, strict=False)
    ):
        axes.set_axis_on()
        eager = statistics.median(result["seconds"]["eager"])
        heights = {n: statistics.median(t) / eager for n, t in result["seconds"].items()}
        axes.bar(list(heights), list(heights.values()))
        axes.axhline(sum(result["floor"].values()) / eager, color="black", label="floor")
        axes.set_title(f"{result['model']}, {result['group']}")
        axes.tick_params(axis="x", rotation=60)
        axes.legend()
    figure.supylabel("step time, multiples of eager on one rank")
    figure.savefig(file, dpi=120)
