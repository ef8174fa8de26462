"""Which process wrote a file, so that a reader can tell later whether it still lives."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

_since_ns: int | None = None


def begin_now() -> None:
    """This process has waited until now to be a rank: its age counts from here."""
    global _since_ns
    _since_ns = time.monotonic_ns()


def process_facts() -> dict[str, Any]:
    """What says later whether this process is alive."""
    pid = os.getpid()
    return {"pid": pid, "born": _start(pid), "host": os.uname().nodename}


def alive(facts: dict[str, Any]) -> str:
    """Whether that process is: "running", "stopped", "dead", or "unknown" on another machine."""
    if facts["host"] != os.uname().nodename:
        return "unknown"
    try:
        fields = Path(f"/proc/{facts['pid']}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "dead"
    if int(fields[19]) != facts["born"] or fields[0] in "ZX":
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def process_age_ns() -> int:
    """How long this process has lived, or been a rank; 0 where that is not known."""
    if _since_ns is not None:
        return time.monotonic_ns() - _since_ns
    born: int = process_facts()["born"]
    if not born:
        return 0
    ticks: int = os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime_ns(time.CLOCK_BOOTTIME) - born * 1_000_000_000 // ticks, 0)


def _start(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
