"""Snapshots on their way from one host to another: what an agent serves, and how it is asked.

A request is a JSON message, `{"want": .., ..}`; so is the answer, and bytes may follow it:

newest    the newest complete snapshot of each own rank of the agent
snapshot  ranges of bytes of a rank's slot, and one byte more: 1 if the slot was whole throughout
journal   the losses of the run
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from msc.runtime.checkpoint.marks import SLOTS, Mark, read_marks, read_note
from msc.runtime.recovery.shelf import Book, Shelf
from msc.runtime.recovery.wire import (
    is_proof,
    keep_alive,
    proof,
    receive_exactly,
    receive_frame,
    receive_into,
    send_frame,
)

Address = tuple[str, int]
_PATIENCE_S = 5.0
"""How long either side waits for the other to go on."""
_REQUEST_BYTES = 1 << 22
_AGAIN_S = 0.1


class Server:
    """Gives what is on a shelf to other hosts that know the token, each in a thread of its own."""

    def __init__(self, shelf: Shelf, journal: int, token: str) -> None:
        self._shelf = shelf
        self._journal = journal
        self._token = token
        self._listener = socket.create_server(("", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="msc-serve", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return  # it was closed
                time.sleep(_AGAIN_S)  # too many files are open
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:  # an asker that is gone asks nothing more
            connection.settimeout(_PATIENCE_S)
            keep_alive(connection)
            challenge = secrets.token_hex(16)
            send_frame(connection, challenge)
            if not is_proof(self._token, challenge, receive_frame(connection, 1 << 10)):
                return
            connection.settimeout(None)
            while True:
                request = receive_frame(connection, _REQUEST_BYTES)
                connection.settimeout(_PATIENCE_S)
                self._answer(connection, request)
                connection.settimeout(None)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        want = request["want"]
        if want == "newest":
            newest = []
            for rank, marks in self._shelf.own_marks().items():
                for mark in sorted(marks, key=lambda each: (each.step, each.generation))[-1:]:
                    newest.append([rank, mark.generation, mark.step])
            send_frame(connection, newest)
        elif want == "journal":
            size = os.fstat(self._journal).st_size
            send_frame(connection, size)
            _send_file(connection, self._journal, 0, size)
        elif want == "snapshot":
            mark = Mark(*request["mark"])
            book = self._shelf.find(request["rank"], mark)
            if book is None:
                send_frame(connection, None)
                return
            try:
                _send_snapshot(connection, book, mark, request["ranges"])
            finally:
                book.close()
        else:
            raise ConnectionError(f"nobody knows what '{want}' is")


def _send_snapshot(
    connection: socket.socket, book: Book, mark: Mark, ranges: Sequence[Sequence[int]] | None
) -> None:
    stride = book.marks // SLOTS
    note = read_note(book.handle, book.marks, book.slot)
    send_frame(connection, {"note": note, "stride": stride})
    for start, end in [(0, stride)] if ranges is None else ranges:
        _send_file(connection, book.handle, book.slot * stride + start, end - start)
    whole = read_marks(book.handle, book.marks)[book.slot] == mark
    connection.sendall(b"\1" if whole else b"\0")


def _send_file(connection: socket.socket, handle: int, start: int, count: int) -> None:
    with open(handle, "rb", closefd=False) as file:
        if count and connection.sendfile(file, start, count) < count:
            raise ConnectionError("the file is shorter than it was")


class Torn(Exception):
    """The snapshot is not there, or was overwritten while it was read."""


class Client:
    """Asks the agent of another host. Raises `OSError` if that does not answer."""

    def __init__(self, address: Address, token: str) -> None:
        self._socket = socket.create_connection(address, _PATIENCE_S)
        try:
            keep_alive(self._socket)
            challenge = receive_frame(self._socket, 1 << 10)
            send_frame(self._socket, proof(token, str(challenge)))
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def newest(self) -> dict[int, Mark]:
        """The newest complete snapshot of each of its ranks."""
        send_frame(self._socket, {"want": "newest"})
        found = receive_frame(self._socket)
        return {rank: Mark(generation, step) for rank, generation, step in found}

    def journal(self) -> bytes:
        """The losses of the run."""
        send_frame(self._socket, {"want": "journal"})
        return receive_exactly(self._socket, receive_frame(self._socket))

    def ask(
        self, rank: int, mark: Mark, ranges: Sequence[tuple[int, int]] | None = None
    ) -> tuple[str, int]:
        """Ask for bytes of a snapshot, None for the whole slot; its note, and the slot's bytes.

        `take` them, one range after another, and then `finish`. Raises `Torn` if it is not there.
        """
        mark_data = [mark.generation, mark.step]
        request = {"want": "snapshot", "rank": rank, "mark": mark_data, "ranges": ranges}
        send_frame(self._socket, request)
        answer = receive_frame(self._socket)
        if answer is None:
            raise Torn(f"the snapshot of rank {rank} in step {mark.step} is not there")
        return answer["note"], answer["stride"]

    def take(self, view: memoryview) -> None:
        """The next bytes of what was asked for."""
        receive_into(self._socket, view)

    def finish(self) -> None:
        """All was taken. Raises `Torn` if it was overwritten meanwhile."""
        if receive_exactly(self._socket, 1) != b"\1":
            raise Torn("the snapshot was overwritten while it was read")
