"""What may still be done after faults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Budget:
    """How many ranks may be replaced (all of a lost node count as one), and so on.

    restarts: how often all may be started anew; least: on how few ranks the run may go on, None for
    no fewer than it was started for.
    """

    replacements: int
    restarts: int
    least: int | None = None

    @property
    def recovers(self) -> bool:
        """Whether a fault is not the end."""
        return self.replacements + self.restarts > 0 or self.least is not None
