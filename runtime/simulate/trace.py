"""A simulated step in the Trace Event Format that Chrome and Perfetto read.

A process per class of ranks, a thread per stream: the compute stream, on which calls, computing and
waiting are nested, and one for each group and channel. Live memory is a counter. The format:
"Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msc.runtime.simulate.result import ClassResult, SimulationResult

_COMPUTE = 0  # thread id of the compute stream


def trace_events(result: SimulationResult) -> dict[str, Any]:
    """The trace as plain data; times are microseconds, whole nanoseconds so that slices nest."""
    return {
        "traceEvents": [event for each in result.classes for event in _process(each)],
        "displayTimeUnit": "ms",
        "otherData": {"mesh": str(result.mesh), "cluster": result.cluster.name},
    }


def _process(each: ClassResult) -> Iterator[dict[str, Any]]:
    pid = each.rank
    more = f" and {each.count - 1} alike" if each.count > 1 else ""
    yield _name("process_name", pid, _COMPUTE, f"{each.name}: rank {pid}{more}")
    yield _name("thread_name", pid, _COMPUTE, "compute")
    # an outer slice before those that it holds, as readers nest what begins together in file order;
    # of two that are equal, the inner one ended first
    for piece in sorted(reversed(each.slices), key=lambda piece: (piece.begin, -piece.end)):
        yield _complete(pid, _COMPUTE, piece.kind, piece.label, piece.begin, piece.end)
    names = dict.fromkeys(transfer.name for transfer in each.transfers)
    threads = {name: number for number, name in enumerate(names, _COMPUTE + 1)}
    for name, tid in threads.items():
        yield _name("thread_name", pid, tid, name)
    for one in each.transfers:
        args = {
            "node": one.node,
            "module": one.module,
            "bytes": one.payload_bytes,
            "exposed_us": _microseconds(one.exposed_seconds),
        }
        tid = threads[one.name]
        yield _complete(pid, tid, "communication", one.kind, one.begin, one.end) | {"args": args}
    for time, size in each.memory:
        yield {
            "name": "memory",
            "ph": "C",
            "ts": _microseconds(time),
            "pid": pid,
            "args": {"bytes": size},
        }


def _complete(
    pid: int, tid: int, category: str, name: str, begin: float, end: float
) -> dict[str, Any]:
    start, stop = _nanoseconds(begin), _nanoseconds(end)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start / 1000,
        "dur": (stop - start) / 1000,
        "pid": pid,
        "tid": tid,
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _microseconds(seconds: float) -> float:
    return _nanoseconds(seconds) / 1000
