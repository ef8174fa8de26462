"""Messages between the controller and agents on other hosts: JSON over TCP, each after its length.

Who connects must know the run's token. The accepting side sends a random text; the first message of
the other side has the token's HMAC of it, and gets one in return. So a stray connection, or one of
another run, is closed before anything that it says is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">I")
LARGEST = 1 << 26
"""Bytes of a message."""
_FIRST = 1 << 20
"""The same before it is known who sends it."""
_CHUNK = 1 << 16
TOKEN = "MSC_RUN_TOKEN"
"""The variable with a secret that all nodes of a run share."""


def token_of(run_id: str) -> str:
    """What proves that a process is of a run: the secret, if there is one, and the run's name."""
    return f"{os.environ.get(TOKEN, '')}/{run_id}"


def proof(token: str, text: str) -> str:
    """That its author knows the token."""
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(token: str, text: str, found: Any) -> bool:
    """Whether `found` is the proof for `text`."""
    return isinstance(found, str) and hmac.compare_digest(proof(token, text), found)


class Wire:
    """One end of a connection; nothing here blocks.

    heard: when something came last; largest: of how many bytes a message may be that comes.
    """

    def __init__(self, connection: socket.socket, largest: int = _FIRST) -> None:
        connection.setblocking(False)
        keep_alive(connection)
        self.heard = time.monotonic()
        self.largest = largest
        self._socket = connection
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    def host(self) -> str:
        """This host, as the other end sees it."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Any) -> None:
        """Send a message, as far as the other end takes it; `flush` sends the rest."""
        data = json.dumps(message).encode()
        self._out += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> bool:
        """Go on with what is unsent; whether all is sent. What cannot be sent is seen in `receive`.

        A connection whose other end takes nothing is cut when too much waits for it.
        """
        try:
            while self._out:
                del self._out[: self._socket.send(memoryview(self._out)[:_CHUNK].tobytes())]
        except BlockingIOError:
            if len(self._out) > LARGEST:
                self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._out.clear()
        return not self._out

    def receive(self) -> tuple[list[Any], bool]:
        """The messages that have come, and whether the connection is still there."""
        open_ = True
        try:
            while data := self._socket.recv(_CHUNK):
                self._in += data
                self.heard = time.monotonic()
            open_ = False
        except BlockingIOError:
            pass
        except OSError:
            open_ = False
        found: list[Any] = []
        try:
            while len(self._in) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._in)
                if length > self.largest:
                    return found, False
                end = _LENGTH.size + length
                if len(self._in) < end:
                    break
                found.append(json.loads(bytes(self._in[_LENGTH.size : end])))
                del self._in[:end]
        except ValueError:
            open_ = False
        return found, open_

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def keep_alive(connection: socket.socket) -> None:
    """See within seconds that the other host is gone, and send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send_frame(connection: socket.socket, message: Any) -> None:
    """Send a message on a connection that blocks."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(connection: socket.socket, largest: int = LARGEST) -> Any:
    """The next message on a connection that blocks; `ConnectionError` if there is none."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > largest:
        raise ConnectionError(f"a message of {length} bytes, more than the {largest} allowed")
    try:
        return json.loads(receive_exactly(connection, length))
    except ValueError as error:
        raise ConnectionError(f"a message that is no JSON: {error}") from error


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; `ConnectionError` if the connection ends before."""
    data = bytearray(count)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill `view`; `ConnectionError` if the connection ends before."""
    while len(view):
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the connection was closed")
        view = view[got:]
