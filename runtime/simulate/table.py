"""A simulated step as text: totals, a line per class of ranks, a line per kind of communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msc.runtime.simulate.result import SimulationResult


def as_text(result: SimulationResult) -> str:
    """Tables with times in milliseconds; those of communication are means over ranks."""
    ranks = "1 rank" if result.mesh.size == 1 else f"{result.mesh.size} ranks"
    mfu = "unknown" if result.mfu is None else f"{result.mfu:.1%}"
    lines = [
        f"{ranks} on mesh {result.mesh}, cluster '{result.cluster.name}'",
        f"step {_ms(result.step_seconds)} ms, MFU {mfu}, HFU {result.hfu:.1%}, "
        f"bubble {result.bubble:.1%}",
        "",
        *_aligned(_classes(result)),
    ]
    capacity = result.cluster.memory_bytes
    if over := [each.name for each in result.classes if each.peak_memory_bytes > capacity]:
        lines.append(f"a device has {_bytes(capacity)}: too little for {', '.join(over)}")
    if communication := _communication(result):
        lines += ["", "communication of one rank, mean over ranks", *_aligned(communication)]
    return "\n".join(lines)


def _classes(result: SimulationResult) -> list[list[str]]:
    axes = list(result.exposed)
    head = ["class", "ranks", "compute ms", "bubble", "skew"]
    rows = [[*head, *(f"exposed {axis}" for axis in axes), "peak memory"]]
    for each in result.classes:
        times = [each.compute_seconds, each.bubble_seconds, each.skew_seconds]
        times += [each.exposed.get(axis, 0.0) for axis in axes]
        memory = _bytes(each.peak_memory_bytes)
        rows.append([each.name, str(each.count), *map(_ms, times), memory])
    return rows


def _communication(result: SimulationResult) -> list[list[str]]:
    kinds = dict.fromkeys(key for each in result.classes for key in each.communication)
    rows = [["over", "kind", "calls", "MB", "total ms", "exposed", "hidden"]]
    size = result.mesh.size
    for key in kinds:
        found = [(each.count, each.communication.get(key)) for each in result.classes]
        totals = [(count / size, total) for count, total in found if total is not None]
        calls = sum(share * total.calls for share, total in totals)
        moved = sum(share * total.payload_bytes for share, total in totals) / 1e6
        seconds = sum(share * total.seconds for share, total in totals)
        exposed = sum(share * total.exposed_seconds for share, total in totals)
        times = [seconds, exposed, seconds - exposed]
        rows.append([*key, f"{calls:.1f}", f"{moved:.2f}", *map(_ms, times)])
    return rows if len(rows) > 1 else []


def _bytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def _ms(seconds: float) -> str:
    return f"{round(1000 * seconds, 3) + 0.0:.3f}"  # no -0.000


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: names to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [all(row[i][:1].isalpha() for row in rows[1:]) for i in range(len(widths))]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, text, strict=True)
        ).rstrip()
        for row in rows
    ]
