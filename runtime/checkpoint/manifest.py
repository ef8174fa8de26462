"""The records of a checkpoint in JSON, and the chain of digests that holds its files together.

    commit.json       names the digest of every part and file beside them, and has its own
    part-00003.json   rank 3's tensors: where they lie in its data file; digests of its chunks
    __3_0.distcp      the data file of rank 3
    .metadata         for torch.distributed.checkpoint only; MSC never reads it
    plan.json         the placements that the program had

All are made of fixed-size chunks or of exact text, so a bit that is changed anywhere is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from msc.ir.errors import UserError

FORMAT = "msc checkpoint"
VERSION = 1
COMMIT = "commit.json"
CHUNK = 65536
"""Bytes of a data file that one digest covers: what a range read may read too much, at most."""
_DIGITS = 16


class DamagedError(UserError):
    """A file of a checkpoint is not what its commit record says; the text names it."""


def digest(data: bytes | memoryview) -> str:
    """The xxh3 digest of 64 bits, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def chunk_digests(data: memoryview, chunk: int = CHUNK) -> list[str]:
    """The digest of each chunk of a file's bytes; the last chunk may be shorter."""
    return [digest(data[start : start + chunk]) for start in range(0, len(data), chunk)]


@dataclass(frozen=True)
class StoredPiece:
    """A box of a whole tensor in a data file.

    start, length: of the item as torch.save writes it; data: where its elements begin.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    length: int
    data: int


@dataclass(frozen=True)
class StoredTensor:
    """The pieces of a whole tensor that are in one data file; dtype as "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint."""

    rank: int
    step: int
    attempt: str
    file: str
    size: int
    tensors: tuple[StoredTensor, ...]
    digests: tuple[str, ...] = ()
    chunk: int = CHUNK

    def damaged(self, index: int, data: bytes | memoryview) -> str:
        """What is wrong with the bytes of a chunk; "" if nothing is."""
        start = index * self.chunk
        if len(data) == min(self.chunk, self.size - start) and digest(data) == self.digests[index]:
            return ""
        return (
            f"{self.file}: bytes {start} to {min(start + self.chunk, self.size)} are not those "
            f"that rank {self.rank} wrote: damaged, or of another save"
        )


@dataclass(frozen=True)
class Commit:
    """The commit record: a checkpoint that has one is complete.

    parts, files: digests of the parts' JSON by their rank, and of other files by name. state: what
    is no tensor: seed, mesh, position of the data, skipped steps.
    """

    step: int
    attempt: str
    parts: tuple[str, ...]
    files: Mapping[str, str]
    state: Mapping[str, Any] = field(default_factory=dict)


def folder_name(step: int, attempt: str) -> str:
    """The folder of one attempt to save a step."""
    return f"step-{step:08d}-{attempt}"


def folder_step(name: str) -> int | None:
    """The step of a folder's name; None if it is no checkpoint's."""
    words = name.split("-")
    return int(words[1]) if len(words) == 3 and words[0] == "step" and words[1].isdigit() else None


def part_name(rank: int) -> str:
    """The file with a rank's part record."""
    return f"part-{rank:05d}.json"


def absent_name(rank: int) -> str:
    """The empty file which says that a rank has no part of this step."""
    return f"absent-{rank:05d}"


def data_name(rank: int) -> str:
    """The data file of a rank, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def part_to_bytes(part: Part) -> bytes:
    """The part's record; equal parts have equal bytes."""
    data = {**asdict(part), "digests": "".join(part.digests)}
    return _dump({"format": FORMAT, "version": VERSION, **data})


def part_from_bytes(raw: bytes, name: str) -> Part:
    """Read a record whose digest was compared before; `name` is for errors."""
    data = _checked(raw, name)
    tensors = tuple(_tensor(each) for each in data.pop("tensors"))
    hexed = data.pop("digests")
    digests = tuple(hexed[i : i + _DIGITS] for i in range(0, len(hexed), _DIGITS))
    return Part(**data, tensors=tensors, digests=digests)


def commit_to_bytes(commit: Commit) -> bytes:
    """The commit record, with the digest of itself."""
    data = {"format": FORMAT, "version": VERSION, **asdict(commit)}
    return _dump({**data, "digest": digest(_dump(data))})


def commit_from_bytes(raw: bytes) -> Commit:
    """Read a commit record; raises `DamagedError` if a bit of it was changed."""
    data = _checked(raw, COMMIT)
    written = data.pop("digest", None)
    body = {"format": FORMAT, "version": VERSION, **data}
    if written != digest(_dump(body)) or _dump({**body, "digest": written}) != raw:
        raise DamagedError(f"{COMMIT} was changed after it was written")
    parts = tuple(data.pop("parts"))
    return Commit(**data, parts=parts)


def tensor_to_data(tensors: Iterable[StoredTensor]) -> list[dict[str, Any]]:
    """Tensors as plain data, as they travel to the writing process."""
    return [asdict(tensor) for tensor in tensors]


def tensors_from_data(data: Sequence[Mapping[str, Any]]) -> tuple[StoredTensor, ...]:
    """What `tensor_to_data` gave."""
    return tuple(_tensor(each) for each in data)


def _tensor(data: Mapping[str, Any]) -> StoredTensor:
    pieces = tuple(
        StoredPiece(tuple(p["offsets"]), tuple(p["lengths"]), p["start"], p["length"], p["data"])
        for p in data["pieces"]
    )
    return StoredTensor(data["name"], data["dtype"], tuple(data["shape"]), pieces)


def _dump(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def _checked(raw: bytes, name: str) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise DamagedError(f"{name} is no JSON ({error})") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise DamagedError(f"{name} is no record of a checkpoint of MSC")
    version = data.pop("version", None)
    if version != VERSION:
        raise DamagedError(f"{name} is of version {version!r}; this MSC reads version {VERSION}")
    return data
