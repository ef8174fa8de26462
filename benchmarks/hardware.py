"""What a measurement was made on, without names of machines."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def hardware() -> dict[str, str]:
    """CPU model, number of cores that this process may use, and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
