"""A file system of fsspec, `faulty://PATH`, whose writes fail or stand still when it is told so.

The file that MSC_FAULTS_DISK names says what it does: "EIO", "stall", or nothing.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

CONTROL = "MSC_FAULTS_DISK"


class FaultyFiles(LocalFileSystem):  # type: ignore[misc]
    """Files of this machine."""

    protocol = "faulty"

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file, which is when a write fails."""
        if "r" not in mode:
            _fail(path)
        return super().open(path, mode, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        """Write a file whole."""
        _fail(path)
        return super().pipe_file(path, value, **options)


def _fail(path: str) -> None:
    control = Path(os.environ[CONTROL])
    while control.read_text() == "stall":
        time.sleep(0.02)
    if control.read_text() == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def install(folder: Path) -> None:
    """Make `folder`, on a Python path, say where the file system is."""
    facts = folder / "faulty_files-1.dist-info"
    facts.mkdir(parents=True)
    facts.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: faulty-files\nVersion: 1\n")
    facts.joinpath("entry_points.txt").write_text(
        f"[fsspec.specs]\nfaulty = {FaultyFiles.__module__}:{FaultyFiles.__name__}\n"
    )
