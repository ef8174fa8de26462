"""Pins from a JSON file, for the command line.

{"layers.*.q_proj.weight": {"tp": "Shard(0)"}, "*.norm.weight": {"tp": "Replicate()"}}
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from msc.ir.errors import PlanError
from msc.ir.placement import Placement, Replicate, Shard

_SHARD = re.compile(r"Shard\((-?\d+)\)")


def load_pins(path: Path | None) -> dict[str, dict[str, Placement]] | None:
    """What `pins=` of `msc.compile` takes; None without a file.

    `PlanError` for a file that cannot be read, and for what is no placement.
    """
    if path is None:
        return None
    try:
        data = json.loads(path.read_text())
        return {
            pattern: {axis: _placement(text, path) for axis, text in axes.items()}
            for pattern, axes in data.items()
        }
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"Pins file '{path}' cannot be read: {error}. It maps patterns of parameter names to "
            'placements, as {"*.q_proj.weight": {"tp": "Shard(0)"}}.'
        ) from error


def _placement(text: object, path: Path) -> Placement:
    if text == "Replicate()":
        return Replicate()
    match = _SHARD.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise PlanError(
            f"Pins file '{path}' has {text!r}; a placement is \"Shard(0)\", with the dim, or "
            '"Replicate()".'
        )
    return Shard(int(match.group(1)))
