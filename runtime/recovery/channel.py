"""Messages between the agent and a process that it has started: JSON, and open files with it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_LARGEST = 1 << 16
_MOST_FILES = 250  # that the kernel passes with one message


class Channel:
    """One end of a connection. A message arrives whole or not at all; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Both ends of a new connection."""
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(first), Channel(second)

    @staticmethod
    def inherited(handle: int) -> Channel:
        """The end that this process was started with; its own children do not get it."""
        os.set_inheritable(handle, False)
        return Channel(socket.socket(fileno=handle))

    def fileno(self) -> int:
        """The descriptor, for selectors and for a child."""
        return self._socket.fileno()

    def send(self, event: str, files: Sequence[int] = (), wait: bool = True, **facts: Any) -> bool:
        """Send a message; False if the other end is gone, or, without `wait`, takes nothing."""
        data = json.dumps({"event": event, "files": len(files), **facts}).encode()
        groups = [files[i : i + _MOST_FILES] for i in range(0, len(files), _MOST_FILES)] or [()]
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            for group in groups:
                if group:
                    socket.send_fds(self._socket, [data], list(group), flags)
                else:
                    self._socket.send(data, flags)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            return False
        return True

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and the files that came with it; None once the other end is gone."""
        files: list[int] = []
        while True:
            try:
                data, found, _, _ = socket.recv_fds(self._socket, _LARGEST, _MOST_FILES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            files += found
            message = json.loads(data)
            if len(files) == message.pop("files"):
                return message, files

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
