"""Memory that ranks of one host write and read directly, with flags that say what lies there.

A file that is mapped by every member of a group and has no name any more once all have it, so that
nothing stays behind, whoever dies. It holds

    begun[s]      the last call that member s has begun
    ready[s]      the last call for which s has put its shard
    sent[s][o]    the last call for which s has put what member o sums
    half 0, half 1

Calls of a group are counted by every member alike, and flags only grow, so they are never reset.
Calls take turns with the halves. A member writes into a half again two calls later; by then it has
waited, in the call between, for something that each other member did after it was through with the
half. So no write meets a reader of the call before, and calls need no barrier.

What is written before a flag is seen before it: x86 keeps stores in order, and on other machines
the lock that `_fence` passes through does.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from msc.ir.errors import CommunicationError, LostRankError
from msc.runtime.process_groups import Communicator

_T = TypeVar("_T")
_PAGE = mmap.ALLOCATIONGRANULARITY
_TOKEN_BYTES = 16
_YIELDS = 50
"""Looks at a flag that only give way to other threads; between later ones it sleeps."""
_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_LOOK_S = 0.5
"""Between two looks at whether the other process is alive."""
_LOCK = threading.Lock()


class SharedMemory:
    """The shared memory of a group, as one of its members sees it; made by `share`.

    Calls must be made by all members in the same order, each with `begin` first. is_alive: whether
    the process of a member is.
    """

    def __init__(
        self,
        mapped: mmap.mmap,
        half_bytes: int,
        to: Communicator,
        group: str,
        timeout_s: float,
        is_alive: Callable[[int], bool],
    ) -> None:
        self.size = len(to.members)
        self.position = to.position
        self._members = to.members
        self._group = group
        self.timeout_s = timeout_s
        self._is_alive = is_alive
        self._half_bytes = half_bytes
        count = self.size * (self.size + 2)
        self._flags = (ctypes.c_int64 * count).from_buffer(mapped, _TOKEN_BYTES)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._start = _header_bytes(self.size)
        self._call = 0
        self._text = ""
        self._aborted = False

    def begin(self, text: str) -> None:
        """Begin the group's next call; `text` names it in errors."""
        self._call += 1
        self._text = text
        self._flags[self.position] = self._call

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This call's half as an uninitialized tensor, the same memory for all members."""
        size = torch.Size(shape).numel() * dtype.itemsize
        assert size <= self._half_bytes
        first = self._start + self._call % 2 * self._half_bytes
        return self._bytes[first : first + size].view(dtype).view(tuple(shape))

    def put(self) -> None:
        """Tell all members that this one's shard is there."""
        self._set(self.size + self.position)

    def put_for(self, owner: int) -> None:
        """Tell a member that what it sums is there."""
        self._set(self._sent(self.position, owner))

    def wait_for_shard(self, source: int) -> None:
        """Wait until a member's shard is there; `CommunicationError` after the time-out."""
        self._wait(self.size + source, source)

    def wait_for_summand(self, source: int) -> None:
        """Wait until what a member has for this one is there; `CommunicationError` as above."""
        self._wait(self._sent(source, self.position), source)

    def abort(self) -> None:
        """End every wait of this member with `LostRankError`; any thread may call it."""
        self._aborted = True

    def _sent(self, source: int, owner: int) -> int:
        return (2 + source) * self.size + owner

    def _set(self, flag: int) -> None:
        _fence()
        self._flags[flag] = self._call

    def _wait(self, flag: int, source: int) -> None:
        for _ in range(_YIELDS):
            if self._done(flag):
                break
            os.sched_yield()
        started, look = time.monotonic(), _LOOK_S
        while not self._done(flag):
            if self._aborted:
                raise self._lost(source, "was given up")
            waited = time.monotonic() - started
            if waited > look:
                look += _LOOK_S
                if not self._is_alive(source) and not self._done(flag):
                    raise self._lost(source, "has ended")
            if waited > self.timeout_s:
                raise self._lost(source, f"gave nothing for {self.timeout_s:g} s")
            # a small part late at most, so that waiting takes little of the processor
            time.sleep(min(max(_SLEEP_S, waited / 16), _LONGEST_SLEEP_S))
        _fence()

    def _done(self, flag: int) -> bool:
        return self._flags[flag] >= self._call

    def _lost(self, source: int, what: str) -> LostRankError:
        rank, peer = self._members[self.position], self._members[source]
        begun = self._flags[source]
        state = "in this call" if begun >= self._call else f"after its call {begun}"
        return LostRankError(
            f"rank {rank} waits for rank {peer} in {self._text}, call {self._call} of the shared "
            f"memory of group '{self._group}' {self._members}, but rank {peer} {what}, {state}. "
            "Look at its output, and restart."
        )


def share(to: Communicator, group: str, half_bytes: int, timeout_s: float) -> SharedMemory | None:
    """Shared memory for the members of a group; None if they are not on one host.

    half_bytes: what the largest call of this member needs; the largest of all members counts.
    Collective over the group. Raises `CommunicationError` if the host has too little memory for it.
    """
    assert to.handle is not None
    half_bytes = max(_exchange(to, half_bytes))
    half_bytes = -(-half_bytes // _PAGE) * _PAGE
    total = memory_bytes(len(to.members), half_bytes)
    made = make_file(total) if to.position == 0 else ("", b"", "")
    path, token, problem = _exchange(to, made)[0]
    if problem:
        raise CommunicationError(
            f"Fused collectives of group '{group}' {to.members} need {total} bytes of shared "
            f"memory: {problem}. Give the host more (docker run --shm-size), or compile with "
            "fuse_collectives=False."
        )
    opened = open_file(path, token, total)
    if opened is not None:
        fcntl.lockf(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, to.position)
    try:
        everyone = all(_exchange(to, opened is not None))
    finally:
        if to.position == 0:
            Path(path).unlink(missing_ok=True)
    if opened is None or not everyone:
        return None
    file, mapped = opened
    memory = SharedMemory(mapped, half_bytes, to, group, timeout_s, partial(_holds_lock, file))
    weakref.finalize(memory, os.close, file)
    return memory


def _holds_lock(file: int, position: int) -> bool:
    """Whether a member's process still has its lock, the byte at its position: else it has ended.

    The kernel takes it away from a process that dies, however it does.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
    except OSError:
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1, position)
    return False


def _exchange(to: Communicator, value: _T) -> list[_T]:
    """The values of all members."""
    found: list[_T | None] = [None] * len(to.members)
    dist.all_gather_object(found, value, group=to.handle)
    return found  # type: ignore[return-value]


def make_file(total: int) -> tuple[str, bytes, str]:
    """A new file of zeros with a token at its start: path, token, and what went wrong."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    file, path = tempfile.mkstemp(prefix="msc-", dir=memory)
    try:
        os.posix_fallocate(file, 0, total)  # now, or a later write to it would be a bus error
        os.pwrite(file, token, 0)
    except OSError as error:
        os.unlink(path)
        return path, token, str(error)
    finally:
        os.close(file)
    return path, token, ""


def open_file(path: str, token: bytes, total: int) -> tuple[int, mmap.mmap] | None:
    """The open file and its memory; None if this host has no such file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(file, _TOKEN_BYTES, 0) != token:
        os.close(file)
        return None
    return file, mmap.mmap(file, total)


def memory_bytes(size: int, half_bytes: int) -> int:
    """Bytes of the whole memory of a group of `size` members."""
    return _header_bytes(size) + 2 * half_bytes


def _header_bytes(size: int) -> int:
    """Bytes of the token and the flags of a group, in whole pages."""
    return -(-(_TOKEN_BYTES + 8 * size * (size + 2)) // _PAGE) * _PAGE


def _fence() -> None:
    """Order memory accesses before it with those after it, as passing a lock twice does."""
    with _LOCK:
        pass
    with _LOCK:
        pass
