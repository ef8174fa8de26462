"""Where a checkpoint lies, and finding it from what a user gives."""

from __future__ import annotations

from dataclasses import dataclass

from msc.ir.errors import UserError
from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.saved_state import SavedState
from msc.runtime.checkpoint.storage import Storage, open_storage


@dataclass(frozen=True)
class Place:
    """A checkpoint: the storage, and its folder in it."""

    storage: Storage
    folder: str

    def __str__(self) -> str:
        return f"{self.storage}/{self.folder}"

    def open(self) -> SavedState:
        """What it holds; raises `DamagedError` if its records are damaged."""
        return SavedState(self.storage, self.folder)


def find(url: str, step: int | None = None) -> Place:
    """The newest complete checkpoint in a folder, or that of a step, or the one that `url` is.

    Raises `UserError` if there is none.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if name.startswith("step-") and step is None:
        return Place(open_storage(parent or "."), name)
    storage = open_storage(url)
    found = catalog.checkpoints(storage)
    steps = sorted({each.step for each in found if each.complete})
    for each in found:
        if each.complete and step in (None, each.step):
            return Place(storage, each.folder)
    if not steps:
        raise UserError(f"{url} has no complete checkpoint.")
    raise UserError(f"{url} has no complete checkpoint of step {step}; it has those of {steps}.")
