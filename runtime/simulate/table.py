"""A simulated step as text: totals, a line per class of ranks, a line per kind of communication."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from msc.runtime.simulate.result import CommunicationTotal, SimulationResult

_Key = TypeVar("_Key", bound=Hashable)
_PLACES = 5


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
    if exposed := _most_exposed(result):
        lines += ["", "most exposed", *_aligned(exposed)]
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
    totals = _means(result, [each.communication for each in result.classes])
    head = ["over", "kind", "calls", "MB", "total ms", "exposed", "hidden"]
    rows = [
        [
            *key,
            f"{calls:.1f}",
            f"{moved / 1e6:.2f}",
            *map(_ms, (seconds, exposed, seconds - exposed)),
        ]
        for key, (calls, moved, seconds, exposed) in totals.items()
    ]
    return [head, *rows] if rows else []


def _most_exposed(result: SimulationResult) -> list[list[str]]:
    """Where the compute stream waits most for communication, at most five places."""
    totals = _means(result, [each.sites for each in result.classes])
    places = sorted(totals.items(), key=lambda item: -item[1][-1])[:_PLACES]
    rows = [
        [axes, kind, f"{calls:.1f}", _ms(exposed), module or "the step"]
        for (axes, kind, module), (calls, _, _, exposed) in places
        if exposed > 0
    ]
    return [["over", "kind", "calls", "exposed ms", "in"], *rows] if rows else []


def _means(
    result: SimulationResult, found: Sequence[Mapping[_Key, CommunicationTotal]]
) -> dict[_Key, tuple[float, float, float, float]]:
    """Calls, bytes, seconds and exposed seconds of each kind, mean over ranks."""
    means: dict[_Key, tuple[float, float, float, float]] = {}
    for each, totals in zip(result.classes, found, strict=True):
        share = each.count / result.mesh.size
        for key, total in totals.items():
            had = means.get(key, (0.0, 0.0, 0.0, 0.0))
            own = (total.calls, total.payload_bytes, total.seconds, total.exposed_seconds)
            a, b, c, d = (have + share * more for have, more in zip(had, own, strict=True))
            means[key] = (a, b, c, d)
    return means


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
