"""The parts of recovery without a run: messages, journal, snapshots, sockets, faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from msc.runtime.checkpoint.arena import Arena, OtherArena
from msc.runtime.checkpoint.marks import Mark, read_marks
from msc.runtime.diagnosis.blame import MISMATCH
from msc.runtime.diagnosis.ring import Ring
from msc.runtime.diagnosis.schedule import Act, collective_channel, to_text
from msc.runtime.recovery import health, sockets
from msc.runtime.recovery.arenas import HeldArena, newest_common
from msc.runtime.recovery.channel import Channel
from msc.runtime.recovery.events import FILE, Events, read_events
from msc.runtime.recovery.faults import Fault, Memory, of_exit
from msc.runtime.recovery.health import Health, Standstill
from msc.runtime.recovery.journal import Entry, Journal
from msc.runtime.recovery.node import NodeAgent
from msc.runtime.recovery.rings import Rings

CPU = torch.device("cpu")


def test_messages_come_whole_and_with_their_files() -> None:
    one, other = Channel.pair()
    files = [os.memfd_create(f"{n}") for n in range(300)]  # more than the kernel passes at once
    for n, handle in enumerate(files):
        os.pwrite(handle, bytes([n % 256]), 0)
    assert one.send("join", files, number=3)
    received = other.receive()
    assert received is not None
    message, handles = received
    assert message == {"event": "join", "number": 3}
    assert [os.pread(handle, 1, 0)[0] for handle in handles] == [n % 256 for n in range(300)]
    for handle in files + handles:
        os.close(handle)
    one.close()
    assert other.receive() is None
    assert not other.send("anything")
    other.close()


def test_a_journal_gives_back_what_a_step_came_to_before() -> None:
    journal = Journal.new()
    journal.begin(1)
    first = Entry(1.5, None, 0.1)
    assert journal.write(1, first) is None
    assert journal.write(2, Entry(1.25, 3.0, 0.2)) is None
    assert journal.write(1, Entry(1.75, None, 0.1)) == first
    assert (journal.steps, [each.loss for each in journal.first(2)]) == (2, [1.75, 1.25])
    assert journal.first(2)[1].norm == 3.0
    journal.begin(1)
    assert journal.steps == 2
    journal.begin(2)  # the next Trainer of the script
    assert journal.steps == 0


def test_a_journal_knows_on_how_many_ranks_a_step_was_taken() -> None:
    journal = Journal.new()
    journal.begin(1)
    first = Entry(1.5, 2.0, 0.1, ranks=12_288)
    journal.write(1, first)
    journal.fill(1, Entry(1.5, 2.0, 0.1))  # from a checkpoint, which does not say
    journal.fill(2, Entry(1.25, 2.0, 0.1))
    assert journal.first(2) == [first, Entry(1.25, 2.0, 0.1, ranks=0)]
    journal.cut(1)
    assert (journal.steps, journal.first(2)) == (1, [first])


def test_the_newest_step_is_one_that_all_have() -> None:
    arenas = [Arena(100, CPU) for _ in range(3)]

    def newest(world: int = 3) -> tuple[Mark, list[int]] | None:
        held = {n: HeldArena(a.handle, a.marks_start).steps() for n, a in enumerate(arenas)}
        found = newest_common(held, world)
        return None if found is None else (found, [held[rank][found] for rank in range(world)])

    assert newest() is None
    for arena in arenas:
        arena.marks.set(0, Mark(1, 4), 0)
    for arena in arenas[1:]:
        arena.marks.set(1, Mark(1, 6), 0)
    assert newest() == (Mark(1, 4), [0, 0, 0])
    arenas[0].marks.set(1, Mark(2, 6), 0)  # the same step of another generation
    assert newest() == (Mark(1, 4), [0, 0, 0])
    arenas[0].marks.set(1, Mark(1, 6), 0)
    assert newest() == (Mark(1, 6), [1, 1, 1])
    arenas[2].marks.clear(1)  # it is being written
    assert newest() == (Mark(1, 4), [0, 0, 0])
    assert newest(4) is None


def test_a_slot_is_read_through_the_open_file_of_another_process() -> None:
    arena = Arena(5000, CPU)
    arena.slots[1].fill_(7)
    assert arena.marks.note(1, "a note")
    assert not arena.marks.note(1, "x" * (1 << 16))
    arena.complete(1, Mark(2, 9))
    other = OtherArena(arena.handle, 5000, 1)
    assert (other.note, other.mark) == ("a note", Mark(2, 9))
    assert torch.equal(other.image, arena.slots[1])
    assert other.is_intact()
    arena.slots[1][4321] ^= 1
    assert not other.is_intact()
    other.withdraw()
    assert read_marks(arena.handle, arena.marks_start) == [None, None]


def test_only_connections_of_groups_are_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        with sockets.recording():
            group = socket.create_connection(server.getsockname())
            listener = socket.create_server(("127.0.0.1", 0))
        waiting = threading.Thread(target=lambda: ended.append(group.recv(1)))
        ended: list[bytes] = []
        waiting.start()
        sockets.shut()
        waiting.join()
        assert ended == [b""]
        accepted, _ = server.accept()
        accepted.sendall(b"x")
        assert mine.recv(1) == b"x"
        late = socket.create_connection(listener.getsockname())  # it listens as before
        sockets.forget()
        for each in (mine, group, listener, accepted, late):
            each.close()


def test_a_socket_that_has_a_number_after_one_of_a_group_is_not_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with sockets.recording():
            group = socket.create_connection(server.getsockname())
        number = group.fileno()
        group.close()
        mine = socket.create_connection(server.getsockname())
        assert mine.fileno() == number
        sockets.shut()
        for _ in range(2):
            accepted, _ = server.accept()
            accepted.send(b"x")
            accepted.close()
        assert mine.recv(1) == b"x"
        mine.close()
        sockets.forget()


def test_who_computes_while_others_wait_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_STEPS_S", "STILL_S", "TIMES", "_LOOK_S"):
        monkeypatch.setattr(health, name, 0.0)
    told, watched = Rings(), Health()
    channel = collective_channel("dp", (0, 1))
    schedule = [Act("all_reduce", channel, 8, "here"), Act("wait", channel, 0, "here", 0)]
    rings = []
    for rank in range(2):
        path, file = tmp_path / f"{rank}.ring", tmp_path / f"{rank}.json"
        rings.append(Ring(path, rank, [channel]))
        file.write_text(to_text(schedule))
        told.watch(rank, path, file)
    for ring in rings:
        ring.phase("step", 1)
    rings[0].enter(rings[0].start("all_reduce", channel, 8))

    def standstill() -> Standstill | None:
        watched.hear(told.news())
        assert watched.wants_rings()
        return watched.judge(json.loads(json.dumps(told.all())), 2)

    found = standstill()
    assert found is not None
    assert [cause.rank for cause in found.guilty] == [1]
    assert found.views == {rank: told.view(rank) for rank in range(2)}
    rings[1].phase("data")  # it may just be slow
    assert standstill() is None
    monkeypatch.setattr(health, "WITHOUT_DATA_S", 0.0)
    found = standstill()
    assert found is not None
    assert "rank 1 waits for data" in found.text


def test_who_runs_another_program_is_found_in_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STILL_S", 0.0)
    channel = collective_channel("dp", (0, 1))
    schedule = [Act("all_reduce", channel, 8, "here"), Act("wait", channel, 0, "here", 0)]
    told, watched = Rings(), Health()
    rings = []
    for rank in range(2):
        path, file = tmp_path / f"{rank}.ring", tmp_path / f"{rank}.json"
        rings.append(Ring(path, rank, [channel]))
        file.write_text(to_text(schedule))
        told.watch(rank, path, file)
        rings[rank].phase("step", 1)
    watched.hear(told.news())
    rings[0].enter(rings[0].start("all_reduce", channel, 8))
    assert watched.mismatches(told.all(), 2) == []
    assert watched.judge(told.all(), 2) is None  # it may be slow
    rings[1].start("all_gather", channel, 8)
    found = watched.judge(told.all(), 2)
    assert found is not None
    assert [(cause.rank, cause.what) for cause in found.guilty] == [(1, MISMATCH)]
    ((cause, view),) = watched.mismatches(told.all(), 2)
    assert "has all_gather on dp:0,1, 8 bytes where its program has all_reduce" in cause.detail
    assert view == told.view(1)


def test_nobody_is_blamed_who_goes_on_while_the_rings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node tells of its ranks' steps comes before their rings."""
    ring = Ring(tmp_path / "0.ring", 0, [collective_channel("dp", (0, 1))])
    (tmp_path / "0.json").write_text(to_text([]))
    agent = NodeAgent(["script.py"], tmp_path)
    told = Rings()
    told.watch(0, tmp_path / "0.ring", tmp_path / "0.json")
    ring.phase("step", 1)
    told.news()
    read = told.all

    def late() -> list[dict[str, Any]]:
        found = read()
        ring.phase("step", 2)
        return found

    monkeypatch.setattr(told, "all", late)
    monkeypatch.setattr(agent, "_rings", told)
    agent.obey("read rings", {})
    assert [report["event"] for report in agent.reports] == ["steps", "rings"]
    assert agent.reports[0]["steps"] == [(0, 2)]
    watched = Health()
    watched.hear({0: 1})
    monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + 60.0)
    watched.hear(dict(agent.reports[0]["steps"]))
    assert watched.judge(agent.reports[1]["rings"], 1) is None
    agent.end()


def test_nobody_is_blamed_before_a_few_steps_say_how_long_they_take(tmp_path: Path) -> None:
    told, watched = Rings(), Health()
    watched.begin(0)
    assert watched.patience_s == health.FIRST_STEPS_S
    ring = Ring(tmp_path / "ring", 0, [])
    told.watch(0, tmp_path / "ring", tmp_path / "schedule")
    for step in range(1, 5):
        ring.phase("step", step)
        watched.hear(told.news())
    assert watched.patience_s == health.STILL_S


def test_steps_that_no_report_tells_of_count_and_those_of_others_do_not() -> None:
    watched = Health()
    watched.begin(6)
    watched.hear({0: 9})  # two steps were taken since the last that was restored
    assert watched.patience_s == health.STILL_S
    watched = Health()
    watched.begin(6)
    assert watched.judge([{"rank": 0, "view": None, "schedule": "[]"}], 1) is None
    other = Health()  # of a controller that was started anew, while ranks train
    other.hear({0: 500})
    assert other.patience_s == health.FIRST_STEPS_S


def test_faults_that_a_program_may_cause_are_tried_once_more() -> None:
    memory = Memory()
    what, program = of_exit(-9)
    assert (what, program) == ("was killed (SIGKILL)", False)
    killed = Fault(1, what, 5, program=program)
    assert not any(memory.hopeless([killed]) for _ in range(5))
    raised = Fault(1, "raised ValueError: x", 5, program=True)
    assert not memory.hopeless([raised])
    assert not memory.hopeless([Fault(1, "raised ValueError: x", 6, program=True)])
    assert memory.hopeless([raised]) == "the same failure came back after another try"
    assert memory.hopeless([Fault(1, "raised InputError: x", 1, final=True)])
    assert of_exit(-11) == ("crashed (SIGSEGV)", True)


def test_events_that_cannot_be_recorded_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE).symlink_to("/dev/full")
    events = Events(tmp_path)
    events.record("fault", rank=1)
    events.record("fault", rank=2)
    told = capsys.readouterr().err
    assert told == "msc: events are lost from here on: [Errno 28] No space left on device\n"


_HALF = """
import resource, sys
from pathlib import Path
from msc.runtime.recovery.events import Events
events = Events(Path(sys.argv[1]))
events.record("fault", rank=1)
limit = (Path(sys.argv[1]) / "events.jsonl").stat().st_size + 10
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
events.record("fault", rank=2)
"""


def test_half_an_event_is_none(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _HALF, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "events are lost from here on" in done.stderr
    assert [each["rank"] for each in read_events(tmp_path)] == [1]
