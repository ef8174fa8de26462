"""Where checkpoints lie: a local or shared folder, or any file system that fsspec knows."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from msc.ir.errors import UserError

BLOCK = 8 << 20


class Storage(ABC):
    """A folder with folders of files; names are relative to it, with `/`.

    All methods raise `OSError` where the file system does; reading what is missing raises
    `FileNotFoundError`.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        return self.url

    @abstractmethod
    def make_folder(self, name: str) -> None:
        """Create a folder, and those above it; it may exist."""

    @abstractmethod
    def write(self, name: str, blocks: Iterable[memoryview]) -> None:
        """Write a file; it is durable when this returns. One that was there is replaced."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file that is there whole or not at all, and durable."""

    @abstractmethod
    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file; fewer than `length` if it is shorter."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The length of a file."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """The names in a folder, sorted; none if it does not exist."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file or a folder; it may be gone."""


class LocalStorage(Storage):
    """A folder of this machine, or one that is mounted on all of them."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(str(folder))
        self._root = Path(folder)

    def make_folder(self, name: str) -> None:
        path = self._root / name
        path.mkdir(parents=True, exist_ok=True)
        _sync_folder(path.parent)

    def write(self, name: str, blocks: Iterable[memoryview]) -> None:
        with open(self._root / name, "wb", buffering=0) as file:
            for block in blocks:
                view = memoryview(block)
                while view:
                    view = view[file.write(view) :]
                _begin_sync(file.fileno(), file.tell() - len(block), len(block))
            os.fsync(file.fileno())

    def put(self, name: str, data: bytes) -> None:
        path = self._root / name
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.write(str(part.relative_to(self._root)), [memoryview(data)])
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with open(self._root / name, "rb", buffering=0) as file:
            file.seek(start)
            if length is None:
                return file.readall()
            found = bytearray(length)
            done = 0
            while done < length:
                count = file.readinto(memoryview(found)[done:])
                if not count:
                    break
                done += count
            return bytes(memoryview(found)[:done])

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        path = self._root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class FsspecStorage(Storage):
    """Any file system of fsspec; a file is durable, and there, when it is closed.

    Raises `UserError` for a URL that fsspec cannot open, such as one whose client is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        super().__init__(url)
        self._fs: Any
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:
            raise UserError(
                f"'{url}' cannot be opened: {type(error).__name__}: {error}. Give a folder, or a "
                "URL that fsspec knows, and install its client."
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def make_folder(self, name: str) -> None:
        with _as_os_errors(name):
            self._fs.makedirs(self._path(name), exist_ok=True)

    def write(self, name: str, blocks: Iterable[memoryview]) -> None:
        with _as_os_errors(name), self._fs.open(self._path(name), "wb") as file:
            for block in blocks:
                file.write(block)

    def put(self, name: str, data: bytes) -> None:
        with _as_os_errors(name):
            self._fs.pipe_file(self._path(name), data)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        with _as_os_errors(name):
            found: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
        return found

    def size(self, name: str) -> int:
        with _as_os_errors(name):
            return int(self._fs.size(self._path(name)))

    def names(self, folder: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            with _as_os_errors(folder):
                found = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors(name):
            self._fs.rm(self._path(name), recursive=True)


@contextlib.contextmanager
def _as_os_errors(name: str) -> Iterator[None]:
    """File systems of fsspec raise what their clients do."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {error}") from error


def _begin_sync(file: int, start: int, length: int) -> None:
    """Let the device write a part of a file while more of it is made; on Linux this advice does.

    The pages are not kept for readers, which a checkpoint seldom has.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice only: what fails is told by fsync
            os.posix_fadvise(file, start, length, os.POSIX_FADV_DONTNEED)


def open_storage(url: str | Path) -> Storage:
    """A path, `file://`, or any other URL that fsspec knows."""
    text = str(url)
    if text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    return FsspecStorage(text) if "://" in text else LocalStorage(text)


def in_blocks(data: memoryview, each: Callable[[memoryview], None]) -> Iterable[memoryview]:
    """The blocks of `data`; `each` sees one before it is given out."""
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        each(block)
        yield block


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
