"""What a measurement was made on, without names of machines."""

from __future__ import annotations

import os
import platform

import torch

from msc.cost.hardware import processor_name


def hardware() -> dict[str, str]:
    """CPU model, number of cores that this process may use, and versions."""
    return {
        "cpu": processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
