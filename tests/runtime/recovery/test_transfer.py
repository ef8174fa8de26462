"""Snapshots between agents, and who may connect."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from msc.ir.errors import LostRankError
from msc.runtime.checkpoint.arena import Arena, OtherArena
from msc.runtime.checkpoint.marks import Digest, Mark
from msc.runtime.recovery.arenas import HeldArena
from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.controller_process import Service, Settings
from msc.runtime.recovery.copier import Copier
from msc.runtime.recovery.environment import HOST, Layout
from msc.runtime.recovery.images import Images, joined
from msc.runtime.recovery.journal import Entry, Journal
from msc.runtime.recovery.link import MemorySource
from msc.runtime.recovery.shelf import Shelf
from msc.runtime.recovery.transfer import Client, Server, Torn
from msc.runtime.recovery.wire import proof, receive_frame, send_frame, token_of

SIZE = 24 << 20  # more than sockets hold
MARK = Mark(1, 4)


class Host:
    """A node's shelf and its server, with one rank's snapshots."""

    def __init__(self) -> None:
        self.arena = Arena(SIZE, torch.device("cpu"))
        self.shelf = Shelf()
        self.shelf.put(3, HeldArena(os.dup(self.arena.handle), self.arena.marks_start))
        self.journal = Journal.new()
        self.server = Server(self.shelf, self.journal.handle, "token")
        self.address = (HOST, self.server.port)

    def save(self, slot: int, mark: Mark) -> None:
        self.arena.marks.clear(slot)
        self.arena.slots[slot].random_(0, 255)
        self.arena.marks.note(slot, f"note of {mark.step}")
        self.arena.complete(slot, mark)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    made = Host()
    made.save(0, MARK)
    yield made
    made.server.close()


def wait_for(shelf: Shelf, marks: set[Mark]) -> None:
    while shelf.marks() != {3: marks}:
        time.sleep(0.01)


def test_a_copy_is_what_was_copied_and_outlives_it(host: Host) -> None:
    shelf = Shelf()
    copier = Copier(shelf, "token")
    copier.copy_from(host.address, [3])
    wait_for(shelf, {MARK})
    book = shelf.find(3, MARK)
    assert book is not None
    copy = OtherArena(book.handle, SIZE, book.slot)
    assert (copy.note, copy.mark) == ("note of 4", MARK)
    assert torch.equal(copy.image, host.arena.slots[0])
    host.save(1, Mark(1, 6))
    wait_for(shelf, {MARK, Mark(1, 6)})
    host.save(0, Mark(2, 6))  # the same step of a later generation
    wait_for(shelf, {Mark(1, 6), Mark(2, 6)})
    host.save(0, MARK)
    host.arena.marks.clear(1)
    copier.copy_from(None, ())
    assert not shelf.marks()


def test_a_rank_gets_the_bytes_it_needs_of_another_host(host: Host) -> None:
    source = MemorySource(MARK, "memory", {}, {3: host.address}, "token")
    with Images(source) as images:
        whole, note = images.get(3, SIZE)
        part, _ = images.get(3, SIZE, [(5, 9), (SIZE - 7, SIZE)])
    assert note == "note of 4"
    assert torch.equal(whole, host.arena.slots[0])
    for start, end in ((5, 9), (SIZE - 7, SIZE)):
        assert torch.equal(part[start:end], whole[start:end])
    assert joined([(6, 9), (0, 2), (2, 4), (1, 3)]) == [(0, 4), (6, 9)]


def test_an_agent_that_is_gone_is_a_lost_peer() -> None:
    with socket.create_server((HOST, 0)) as found:
        address = found.getsockname()
    with Images(MemorySource(MARK, "memory", {}, {3: address}, "token")) as images:
        with pytest.raises(LostRankError, match="snapshot of rank 3 in step 4 does not come from"):
            images.get(3, SIZE)


def test_a_snapshot_that_is_overwritten_while_it_is_read_does_not_count(host: Host) -> None:
    with Client(host.address, "token") as client:
        with pytest.raises(Torn, match="rank 3 in step 5 is not there"):
            client.ask(3, Mark(1, 5))
        stride = client.ask(3, MARK).stride
        host.arena.marks.clear(0)
        client.take(memoryview(bytearray(stride)))
        with pytest.raises(Torn, match="overwritten"):
            client.finish()
    host.arena.complete(0, MARK)


def test_a_damaged_snapshot_is_neither_copied_nor_given_to_its_rank(host: Host) -> None:
    mark = Mark(1, 8)
    host.save(1, mark)
    host.arena.slots[1][SIZE // 2] ^= 1
    with Client(host.address, "token") as client:
        answer = client.ask(3, mark)
        found = Digest()
        found.update(_taken(client, answer.stride))
        assert found.finish(answer.note) != answer.digest  # what a copier sees
        source = MemorySource(mark, "memory", {}, {3: host.address}, "token")
        with Images(source) as images, pytest.raises(LostRankError, match="or damaged"):
            images.get(3, SIZE)
        with pytest.raises(Torn, match="is not there"):  # nobody gets it any more
            client.ask(3, mark)
    assert host.shelf.marks() == {3: {MARK}}


def _taken(client: Client, count: int) -> memoryview:
    view = memoryview(bytearray(count))
    client.take(view)
    client.finish()
    return view


def test_a_journal_moves_to_a_node_that_has_none(host: Host) -> None:
    host.journal.begin(1)
    host.journal.write(1, Entry(1.5, None, 0.1))
    other = Journal.new()
    with Client(host.address, "token") as client:
        other.replace(client.journal())
    assert other.first(1) == host.journal.first(1)


def test_who_does_not_know_the_token_gets_nothing(host: Host) -> None:
    with (
        Client(host.address, "another") as client,
        pytest.raises(ConnectionError, match=r"closed|reset"),
    ):
        client.newest()


def test_connections_that_are_not_of_the_run_are_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listener = socket.create_server((HOST, 0))
    settings = Settings(
        Layout(1, 1, "run", 0), HOST, Budget(0, 0), str(tmp_path), 0, 60.0, False, os.getpid()
    )
    service = threading.Thread(target=Service(listener, settings).run)
    service.start()
    address = listener.getsockname()
    for stray in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}"):
        with socket.create_connection(address) as connection:
            connection.sendall(stray)
            connection.settimeout(30)
            while connection.recv(1 << 10):  # the challenge, and the end
                pass
    hello = {"name": "a", "agent": "b", "wish": None, "layout": [2, 1], "port": 1}
    answers = []
    for layout in ([2, 1], [1, 1]):
        connection = socket.create_connection(address)
        shown = proof(token_of("run"), receive_frame(connection))
        state: dict[str, Any] = {"memo": None, "ranks": []}
        send_frame(connection, hello | {"proof": shown, "layout": layout, "state": state})
        answer = receive_frame(connection)
        assert answer["proof"] == proof(token_of("run"), shown)
        answers.append(answer["refusal"])
        if layout == [2, 1]:
            connection.close()
    assert "--nnodes 2 --nproc 1, and the run with --nnodes 1 --nproc 1" in answers[0]
    assert not answers[1]
    at = {"rank": 0, "process": 1, "step": None, "doing": ""}
    send_frame(connection, {"event": "exit", **at, "code": 0, "detect_s": 0.0})
    commands: list[Any] = []
    while not commands or commands[-1]["command"] != "end":
        commands.append(receive_frame(connection))
    assert commands[-1]["facts"] == {"code": 0}
    assert "start" in [each["command"] for each in commands]
    connection.close()
    service.join()
    listener.close()
    assert "it is not of this run" in capfd.readouterr().err
