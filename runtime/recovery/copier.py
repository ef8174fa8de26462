"""Copies of another node's snapshots: they are there when that node is not."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Collection

from msc.runtime.checkpoint.marks import BYTES, SLOTS, Digest, Mark, Marks
from msc.runtime.recovery.shelf import Shelf
from msc.runtime.recovery.transfer import Address, Answer, Client, Torn

_LOOK_S = 0.2
"""Between two questions whether there is a newer snapshot."""
_CHUNK = 4 << 20


class Copier:
    """Fetches snapshots of a node's ranks, in a thread of its own, one after another.

    A copy has two slots, as what it copies: the older one is overwritten, and counts again when all
    of it is there.
    """

    def __init__(self, shelf: Shelf, token: str) -> None:
        self._shelf = shelf
        self._token = token
        self._change = threading.Condition()
        self._source: tuple[Address, frozenset[int]] | None = None
        threading.Thread(target=self._run, name="msc-copies", daemon=True).start()

    def copy_from(self, address: Address | None, ranks: Collection[int]) -> None:
        """Copy these ranks from the agent at `address` from now on; None copies nothing."""
        with self._change:
            self._source = None if address is None else (address, frozenset(ranks))
            self._change.notify()
        self._shelf.keep_copies(ranks)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._source is not None)
                source = self._source
            assert source is not None
            with contextlib.suppress(OSError, Torn):  # its node may be gone; it is asked again
                with Client(source[0], self._token) as client:
                    while self._source is source:
                        self._look(client, source[1])
                        self._pause(source)
            self._pause(source)

    def _pause(self, source: object) -> None:
        with self._change:
            self._change.wait_for(lambda: self._source is not source, _LOOK_S)

    def _look(self, client: Client, ranks: Collection[int]) -> None:
        for rank, mark in client.newest().items():
            if rank in ranks and mark not in self._shelf.copies(rank):
                self._copy(client, rank, mark)

    def _copy(self, client: Client, rank: int, mark: Mark) -> None:
        epoch = self._shelf.epoch
        answer = client.ask(rank, mark)
        handle = self._shelf.copy_into(rank, answer.stride, epoch)
        if handle is None:
            raise Torn("all snapshots were thrown away meanwhile")
        try:
            self._fill(client, handle, answer, mark)
        finally:
            os.close(handle)

    def _fill(self, client: Client, handle: int, answer: Answer, mark: Mark) -> None:
        stride = answer.stride
        area = mmap.mmap(handle, BYTES, offset=SLOTS * stride)
        with area, memoryview(area) as view:
            marks = Marks.existing(view)
            slot = marks.oldest()
            marks.clear(slot)
            buffer = memoryview(bytearray(min(_CHUNK, stride)))
            found = Digest()
            place, end = slot * stride, (slot + 1) * stride
            while place < end:
                part = buffer[: end - place]
                client.take(part)
                found.update(part)
                place += os.pwrite(handle, part, place)
            client.finish()
            if found.finish(answer.note) != answer.digest:
                raise Torn(f"the snapshot of step {mark.step} is damaged")
            marks.note(slot, answer.note)
            marks.set(slot, mark, answer.digest)
