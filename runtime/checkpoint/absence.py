"""A rank whose part of a step will never come says so in the step's folder.

So rank 0's writer gives the step up at once, where it would wait for the part as long as a slow
rank may take.
"""

from __future__ import annotations

import contextlib
import threading

from msc.runtime.checkpoint.manifest import absent_name, folder_name
from msc.runtime.checkpoint.storage import Storage


class Absence:
    """Says it for one rank, in the background: training does not wait for storage."""

    def __init__(self, storage: Storage, rank: int) -> None:
        self._storage = storage
        self._rank = rank

    def say(self, attempt: str, step: int) -> None:
        """The part of `step` will not come; where storage fails, nobody hears of it."""
        if self._rank:  # rank 0 does not ask for the others' parts of what it has not saved
            args = (folder_name(step, attempt), absent_name(self._rank))
            threading.Thread(target=self._put, args=args, daemon=True).start()

    def _put(self, folder: str, name: str) -> None:
        with contextlib.suppress(OSError):
            self._storage.make_folder(folder)
            self._storage.put(f"{folder}/{name}", b"")
