"""Which checkpoint a run goes on from: the newest that is complete and intact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from msc.checkpoint.files import HISTORY
from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.manifest import DamagedError, commit_to_bytes
from msc.runtime.checkpoint.storage import Storage


class Candidates:
    """Rank 0: offers the complete checkpoints, newest first, until one is taken."""

    def __init__(self, storage: Storage, tell: Callable[[str], None]) -> None:
        self._storage = storage
        self._tell = tell
        self._refused: list[str] = []
        self._offers = self._found()
        self._now = ""

    def offer(self) -> bytes:
        """The next one's records; `{}` if there is none, an "error" if all were refused."""
        try:
            return json.dumps(next(self._offers, {})).encode()
        except OSError as error:
            return json.dumps({"error": f"{self._storage} cannot be read: {error}"}).encode()

    def refuse(self, why: str) -> None:
        """The checkpoint offered last is damaged."""
        self._refused.append(f"  {self._now}: {why}")
        self._tell(f"checkpoint {self._now} is damaged and not used: {why}")

    def _found(self) -> Iterator[dict[str, Any]]:
        for found in catalog.checkpoints(self._storage):
            self._now = found.folder
            if not found.complete:
                self._tell(f"checkpoint {found.folder} is incomplete and not used")
                continue
            history = "{}"
            try:
                commit = catalog.read_commit(self._storage, found.folder)
                for name, expected in commit.files.items():
                    raw = catalog.read_file(self._storage, found.folder, name, expected)
                    if name == HISTORY:
                        history = raw.decode()
                parts = list(catalog.raw_parts(self._storage, found.folder, commit))
            except DamagedError as error:
                self.refuse(str(error))
                continue
            yield {
                "folder": found.folder,
                "commit": commit_to_bytes(commit).decode(),
                "parts": [part.decode() for part in parts],
                "history": history,
            }
        if self._refused:
            yield {
                "error": f"No checkpoint in {self._storage} is intact:\n"
                + "\n".join(self._refused)
                + "\nTraining does not start over by itself. Bring one of them back from a copy, "
                "or save into another folder."
            }
