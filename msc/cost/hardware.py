"""What the hardware of this machine is called, without names of machines."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor_name() -> str:
    """The model of this machine's processor, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, "") or platform.processor() or platform.machine()


def device_name(device: torch.device, interpreted: bool = False) -> str:
    """What a device is called, the same for equal ones: times of one are of use on the others.

    interpreted: kernels run in Triton's interpreter.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}{', interpreted' if interpreted else ''}"
