"""The sockets of this process's groups, so that they can be shut while a collective blocks.

gloo's own abort wakes nobody: a rank whose peer is gone sits in its collective until the time-out,
unless the dead peer is its neighbour. What ends every wait is that the group's connections are
shut, by another thread. Which connections those are nobody says, so what is opened while a group is
made is taken down.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_opened: set[tuple[int, int]] = set()  # (descriptor, inode), as descriptors are used again
_before: list[set[tuple[int, int]]] = []  # of groups that are being made


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Note the sockets that are opened inside as those of groups."""
    before = _sockets()
    with _lock:
        _before.append(before)
    try:
        yield
    finally:
        with _lock:
            _before.remove(before)
            _opened.update(_sockets() - before)


def shut() -> None:
    """Shut all connections of groups, also of those that are just being made."""
    with _lock:
        found = set(_opened)
        if _before:
            found |= _sockets() - _before[0]
    for handle, inode in found:
        _shut(handle, inode)


def forget() -> None:
    """All groups were destroyed."""
    with _lock:
        _opened.clear()


def _sockets() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.add((int(name), int(target[len("socket:[") : -1])))
    return found


def _shut(handle: int, inode: int) -> None:
    with contextlib.suppress(OSError):  # it was closed, or is not connected
        copy = os.dup(handle)
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as found:
            # gloo aborts the process if the socket that it listens on is shut
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if found.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                found.shutdown(socket.SHUT_RDWR)
