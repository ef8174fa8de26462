"""What a user may ask of activation recomputation (`msc.compile(recompute=...)`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msc.ir.errors import PlanError

POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class MemoryBudget:
    """Recompute what costs least, of the choices tried, with every rank within `bytes_per_rank`.

    The bytes are those of `Program.memory_bytes`: parameters, gradients, optimizer state, inputs,
    saved activations and what is live only inside a forward or backward. `PlanError` unless they
    are a positive number.
    """

    bytes_per_rank: float

    def __post_init__(self) -> None:
        given = self.bytes_per_rank
        if not isinstance(given, (int, float)) or isinstance(given, bool) or not given > 0:
            raise PlanError(
                f"MemoryBudget has bytes_per_rank={given!r}; it is a positive number of bytes."
            )


def as_recompute(given: Any) -> str | MemoryBudget:
    """The policy or budget itself; `PlanError` for what is neither."""
    if isinstance(given, MemoryBudget) or (isinstance(given, str) and given in POLICIES):
        return given
    names = ", ".join(f'"{name}"' for name in POLICIES)
    raise PlanError(f"recompute is {given!r}; it is one of {names}, or msc.MemoryBudget(bytes).")
