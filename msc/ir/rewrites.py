"""Changes of a model's mathematics that its user asks for (`msc.compile(rewrites=...)`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import fx

LEFT_ALONE = "left alone: "
"""Before the reason of a place that was not rewritten, in its text."""


@dataclass(frozen=True)
class Finding:
    """One place that a rewrite looked at.

    rewrite: its class, or the name of a pass that has findings; where: the module, such as
    "layers.3"; changed: whether it was rewritten; what: what was done, or why it was left alone.
    """

    rewrite: str
    where: str
    changed: bool
    what: str

    def __str__(self) -> str:
        kept = "" if self.changed else LEFT_ALONE
        return f"{self.rewrite}, {self.where or 'the model'}: {kept}{self.what}"


@dataclass(frozen=True)
class Rewrite(ABC):
    """A rewrite of the normalized forward graph; a frozen dataclass whose fields are its options.

    It runs before the cut, on one device's view of the whole model. What it makes is the model from
    then on: `msc.verify` compares with the rewritten model on one device.
    """

    @abstractmethod
    def apply(self, gm: fx.GraphModule) -> list[Finding]:
        """Rewrite `gm` in place; a finding per place, also for those that are left alone."""
