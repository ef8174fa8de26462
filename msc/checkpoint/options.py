"""`msc.Checkpoint`: where and when a training run is saved."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from msc.ir.errors import InputError


@dataclass(frozen=True)
class Checkpoint:
    """Save a run into a folder, and go on from the newest step that is complete and intact there.

    Args:
        url: a folder that all ranks see, or any URL that fsspec knows.
        every: save after every so many steps, or when so much time has passed (a timedelta).
        keep: how many complete checkpoints stay; None keeps all. The last one that was read whole
            and found intact stays in any case.
        when_busy: what to do when both copies in memory are still being written: "skip" the save
            and say so, or "wait".

    Raises `InputError` for values out of range.
    """

    url: str | Path
    every: int | timedelta = 100
    keep: int | None = 3
    when_busy: Literal["skip", "wait"] = "skip"

    def __post_init__(self) -> None:
        if not isinstance(self.url, (str, Path)) or not str(self.url):
            raise InputError(
                f"url is {self.url!r}; it is the folder, or URL, that checkpoints go to."
            )
        if isinstance(self.every, timedelta):
            good = self.every > timedelta(0)
        else:
            good = _is_count(self.every)
        if not good:
            raise InputError(
                f"every is {self.every!r}; it is a number of steps, or a datetime.timedelta, above "
                "zero."
            )
        if self.keep is not None and not _is_count(self.keep):
            raise InputError(f"keep is {self.keep!r}; it is at least 1, or None to keep all.")
        if self.when_busy not in ("skip", "wait"):
            raise InputError(f'when_busy is {self.when_busy!r}; it is "skip" or "wait".')


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
