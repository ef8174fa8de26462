"""Rank 0's writer: a step is committed when every rank's part is durable; then old ones go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.manifest import (
    COMMIT,
    Commit,
    absent_name,
    commit_to_bytes,
    data_name,
    digest,
    folder_name,
    part_name,
)
from msc.runtime.checkpoint.storage import Storage

Tell = Callable[..., None]
"""`tell(event, **facts)`: reports to the trainer."""


@dataclass
class _Pending:
    step: int
    state: Mapping[str, Any]
    files: Mapping[str, str]
    since: float


class Committer:
    """Commits the steps whose parts are all there.

    files: what is written beside the parts of each step, by name. keep: how many complete
    checkpoints stay, None for all. verified: folders that were read whole and found intact.
    patience_s: how long a step waits for the parts of other ranks before it is given up.
    """

    def __init__(
        self,
        storage: Storage,
        world: int,
        attempt: str,
        files: Mapping[str, bytes],
        keep: int | None,
        verified: Iterable[str],
        tell: Tell,
        patience_s: float,
    ) -> None:
        self._storage = storage
        self._world = world
        self._attempt = attempt
        self._files = files
        self._keep = keep
        self._verified = set(verified)
        self._tell = tell
        self._patience_s = patience_s
        self._pending: list[_Pending] = []
        self._progress: int | None = None
        self._older: set[str] = set()  # what was there before this attempt
        with contextlib.suppress(OSError):
            self._older.update(storage.names())

    @property
    def verified(self) -> set[str]:
        """Folders that were read whole and found intact."""
        return set(self._verified)

    def hurry(self, patience_s: float) -> None:
        """Some ranks of this attempt are gone: give a step up when nothing of it grows so long."""
        self._patience_s = patience_s
        self._progress = -1

    def expect(self, step: int, state: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """This rank's part of `step` is durable; commit the step when all others are.

        texts: contents of files of this step alone, by name.
        """
        folder = folder_name(step, self._attempt)
        digests = {}
        for name, data in {**self._files, **{n: t.encode() for n, t in texts.items()}}.items():
            self._storage.put(f"{folder}/{name}", data)
            digests[name] = digest(data)
        self._pending.append(_Pending(step, state, digests, time.monotonic()))

    def poll(self) -> bool:
        """Commit what is complete; whether steps are still waiting."""
        if self._progress is not None:
            before, self._progress = self._progress, self.progress()
            if before != self._progress:
                for pending in self._pending:
                    pending.since = time.monotonic()
        for pending in list(self._pending):
            folder = folder_name(pending.step, self._attempt)
            there = set(self._storage.names(folder))
            missing = {part_name(rank) for rank in range(self._world)} - there
            absent = [rank for rank in range(self._world) if absent_name(rank) in there]
            if not missing:
                self._commit(folder, pending)
            elif absent:
                self._pending.remove(pending)
                ranks = ", ".join(f"rank {rank}" for rank in absent)
                self._report("abandoned", pending.step, error=f"{ranks} did not save it")
            elif time.monotonic() - pending.since > self._patience_s:
                self._pending.remove(pending)
                self._report("abandoned", pending.step, error=f"{_some(missing)} did not come")
        return bool(self._pending)

    def progress(self) -> int:
        """Bytes that are there of the data of steps that wait."""
        total = 0
        for pending in self._pending:
            folder = folder_name(pending.step, self._attempt)
            for name in map(data_name, range(self._world)):
                with contextlib.suppress(OSError):
                    total += self._storage.size(f"{folder}/{name}")
        return total

    def _commit(self, folder: str, pending: _Pending) -> None:
        parts = tuple(
            digest(self._storage.read(f"{folder}/{part_name(rank)}")) for rank in range(self._world)
        )
        commit = Commit(pending.step, self._attempt, parts, pending.files, pending.state)
        self._storage.put(f"{folder}/{COMMIT}", commit_to_bytes(commit))
        self._pending.remove(pending)
        self._report("committed", pending.step, seconds=time.monotonic() - pending.since)
        # What waits behind a later step will never be whole: ranks write their steps in order.
        for older in [each for each in self._pending if each.step < pending.step]:
            self._pending.remove(older)
            self._report("abandoned", older.step, error="not all ranks saved it")
        if self._keep is not None:
            waiting = {folder_name(each.step, self._attempt) for each in self._pending}
            # Ranks that have met again may write an attempt of which this process does not know.
            waiting |= {
                name
                for name in set(self._storage.names()) - self._older
                if not name.endswith(f"-{self._attempt}")
            }
            catalog.prune(
                self._storage,
                self._keep,
                self._verified,
                waiting,
                lambda text: self._tell("warning", error=text),
            )

    def _report(self, event: str, step: int, **facts: Any) -> None:
        self._tell(event, step=step, attempt=self._attempt, **facts)


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
