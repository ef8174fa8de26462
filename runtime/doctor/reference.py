"""The file of what a sound machine measures, against which machines of its kind are judged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from msc.cost.hardware import processor_name
from msc.ir.errors import UserError
from msc.runtime.doctor.check import Check, Known, Reference


def machine_kind() -> dict[str, Any]:
    """What two machines must share for one to be the other's reference."""
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {"processor": processor_name(), "cores": os.cpu_count(), "devices": names}


def load_reference(file: Path, quick: bool) -> Reference:
    """What `save_reference` wrote; `UserError` if it is of another kind of machine or effort."""
    try:
        found = json.loads(file.read_text())
        kind, effort = found["machine"], found["quick"]
        checks = {
            str(name): Known(
                {value: float(number) for value, number in told["values"].items()},
                tuple(map(str, told["facts"])),
            )
            for name, told in found["checks"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no reference of msc doctor: {error}") from error
    here = machine_kind()
    if kind != here:
        raise UserError(
            f"{file} is of another kind of machine, {kind}; this one is {here}. Write one with "
            "--write-reference on a machine of this kind that is known to be sound."
        )
    if effort != quick:
        raise UserError(
            f"{file} was written {'with' if effort else 'without'} --quick: check "
            f"{'with' if effort else 'without'} it too, or write another with --write-reference."
        )
    return checks


def save_reference(file: Path, checks: Sequence[Check], quick: bool) -> None:
    """Keep what was measured here, for later runs on machines of this kind."""
    told = {
        check.name: {
            "values": {name: value.number for name, value in check.values.items()},
            "facts": list(check.facts),
        }
        for check in checks
    }
    text = json.dumps({"machine": machine_kind(), "quick": quick, "checks": told}, indent=2)
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise UserError(f"The reference {file} cannot be written: {error}") from error
