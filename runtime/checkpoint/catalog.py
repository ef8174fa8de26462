"""The checkpoints in a folder: which are complete, which are intact, which may go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from msc.runtime.checkpoint.manifest import (
    COMMIT,
    Commit,
    DamagedError,
    Part,
    commit_from_bytes,
    digest,
    folder_step,
    part_from_bytes,
    part_name,
)
from msc.runtime.checkpoint.storage import BLOCK, Storage


@dataclass(frozen=True)
class Found:
    """A folder of a checkpoint: complete if it has a commit record, damaged or not."""

    folder: str
    step: int
    complete: bool


def checkpoints(storage: Storage) -> list[Found]:
    """All checkpoints, newest step first."""
    found = [
        Found(name, step, COMMIT in storage.names(name))
        for name in storage.names()
        if (step := folder_step(name)) is not None
    ]
    return sorted(found, key=lambda each: (each.step, each.folder), reverse=True)


def read_commit(storage: Storage, folder: str) -> Commit:
    """The commit record of a checkpoint.

    Raises `DamagedError` if it is missing, was changed, or belongs to another folder.
    """
    try:
        commit = commit_from_bytes(storage.read(f"{folder}/{COMMIT}"))
    except OSError as error:
        raise DamagedError(f"{COMMIT} cannot be read ({error})") from error
    if not folder.endswith(f"{commit.step:08d}-{commit.attempt}"):
        raise DamagedError(f"{COMMIT} is of step {commit.step}, attempt {commit.attempt}")
    return commit


def read_file(storage: Storage, folder: str, name: str, expected: str) -> bytes:
    """A small file; raises `DamagedError` unless it has the digest that is expected."""
    try:
        raw = storage.read(f"{folder}/{name}")
    except OSError as error:
        raise DamagedError(f"{name} cannot be read ({error})") from error
    if digest(raw) != expected:
        raise DamagedError(f"{name} is not what was committed: damaged, or of another save")
    return raw


def raw_parts(storage: Storage, folder: str, commit: Commit) -> Iterator[bytes]:
    """The records of all ranks' parts, compared with the commit record."""
    for rank, expected in enumerate(commit.parts):
        yield read_file(storage, folder, part_name(rank), expected)


def read_parts(storage: Storage, folder: str, commit: Commit) -> list[Part]:
    """All ranks' parts; raises `DamagedError`."""
    raws = raw_parts(storage, folder, commit)
    return [part_from_bytes(raw, part_name(rank)) for rank, raw in enumerate(raws)]


def check_data(storage: Storage, folder: str, part: Part) -> int:
    """Read a data file whole and compare its chunks; returns its length.

    Raises `DamagedError`.
    """
    name = f"{folder}/{part.file}"
    per_block = max(1, BLOCK // part.chunk)
    try:
        if storage.size(name) != part.size:
            raise DamagedError(f"{part.file} has {storage.size(name)} bytes instead of {part.size}")
        for first in range(0, len(part.digests), per_block):
            start = first * part.chunk
            length = min(per_block * part.chunk, part.size - start)
            data = memoryview(storage.read(name, start, length))
            for index in range(first, min(first + per_block, len(part.digests))):
                at = (index - first) * part.chunk
                problem = part.damaged(index, data[at : at + part.chunk])
                if problem:
                    raise DamagedError(problem)
    except OSError as error:
        raise DamagedError(f"{part.file} cannot be read ({error})") from error
    return part.size


def verify(storage: Storage, folder: str) -> int:
    """Read a checkpoint whole; returns the bytes of its data. Raises `DamagedError`."""
    commit = read_commit(storage, folder)
    for name, expected in commit.files.items():
        read_file(storage, folder, name, expected)
    return sum(check_data(storage, folder, part) for part in read_parts(storage, folder, commit))


def remove(storage: Storage, folder: str) -> None:
    """Remove a checkpoint: first its commit record, so that what is left is never complete."""
    storage.remove(f"{folder}/{COMMIT}")
    storage.remove(folder)


def prune(
    storage: Storage,
    keep: int,
    verified: set[str],
    pending: Collection[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Remove all but the newest `keep` complete checkpoints; returns the folders removed.

    verified: folders that were read whole and found intact; what is verified here is added. The
    last verified one goes only after a newer one was read whole: if that is damaged, `tell` says so
    and everything stays. Incomplete ones go if a complete one of their step or a later one stays,
    unless they are `pending`.
    """
    found = checkpoints(storage)
    complete = [each.folder for each in found if each.complete]
    kept, old = complete[:keep], complete[keep:]
    if old and not verified.intersection(kept):
        intact = next((each for each in kept if _is_intact(storage, each, tell)), None)
        if intact is None:
            return []
        verified.add(intact)
    newest = max((each.step for each in found if each.folder in kept), default=-1)
    stale = [
        each.folder
        for each in found
        if not each.complete and each.step <= newest and each.folder not in pending
    ]
    for folder in [*old, *stale]:
        remove(storage, folder)
        verified.discard(folder)
    return [*old, *stale]


def _is_intact(storage: Storage, folder: str, tell: Callable[[str], None]) -> bool:
    try:
        verify(storage, folder)
    except DamagedError as error:
        tell(f"{folder} is damaged: {error}; nothing is removed")
        return False
    return True
