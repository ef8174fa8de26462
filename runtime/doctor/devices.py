"""Which accelerators the driver has, and whether torch sees all of them."""

from __future__ import annotations

from pathlib import Path

import torch

from msc.runtime.doctor.check import Check, failed, passed


def check_devices(
    expected: int | None, dev: Path = Path("/dev"), visible: int | None = None
) -> Check:
    """Compare the driver's device files, what torch sees, and what is expected, if that is given.

    visible: how many torch sees; None asks it.
    """
    files = [f for f in dev.glob("nvidia*") if f.name.removeprefix("nvidia").isdecimal()]
    seen = torch.cuda.device_count() if visible is None else visible
    detail = f"torch sees {seen} CUDA devices, the driver has {len(files)}"
    if seen != len(files):
        return failed("devices", detail)
    if expected is not None and seen != expected:
        return failed("devices", f"{detail}, {expected} are expected")
    return passed("devices", detail)
