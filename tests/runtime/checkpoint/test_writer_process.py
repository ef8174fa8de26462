"""The writing process: what it is handed it writes, and its death loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from msc.ir.errors import CommunicationError
from msc.runtime.checkpoint import writer_process
from msc.runtime.checkpoint.arena import Arena
from msc.runtime.checkpoint.catalog import checkpoints, verify
from msc.runtime.checkpoint.storage import LocalStorage
from msc.runtime.checkpoint.writer_process import WriterProcess

SIZE = 300_000
Make = Callable[..., WriterProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[WriterProcess] = []

    def run(
        folder: Path = tmp_path,
        lines: list[str] | None = None,
        absent: list[tuple[str, int]] | None = None,
    ) -> WriterProcess:
        plan = {
            "url": str(folder),
            "rank": 0,
            "world": 1,
            "attempt": "aa",
            "tensors": [],
            "files": {},
            "keep": 1,
            "verified": [],
        }
        arena = Arena(SIZE, torch.device("cpu"))
        log = (lambda line: None) if lines is None else lines.append
        never = [] if absent is None else absent
        absence = lambda *which: never.append(which)  # noqa: E731
        made.append(WriterProcess(arena, plan, True, log, absence))
        made[-1].arena = arena  # type: ignore[attr-defined]
        return made[-1]

    yield run
    for each in made:
        each.close(10)


def save(writer: Any, step: int) -> None:
    slot = writer.take_slot(wait=True)
    writer.arena.slots[slot].fill_(step)
    writer.save(step, slot, {"state": {}, "files": {}})


def saved(folder: Path) -> list[int]:
    """Steps that are complete and intact and have the right bytes."""
    storage = LocalStorage(folder)
    found = [each for each in checkpoints(storage) if each.complete]
    for each in found:
        verify(storage, each.folder)
        assert storage.read(f"{each.folder}/__0_0.distcp") == bytes([each.step]) * SIZE
    return [each.step for each in found]


def test_saves_are_written_in_order(tmp_path: Path, make: Make) -> None:
    writer = make()
    for step in (1, 2, 3, 4):
        save(writer, step)
    assert writer.flush(60)
    assert (writer.written, writer.committed) == (4, 4)
    writer.close(60)
    assert saved(tmp_path) == [4]


def test_there_are_two_slots(tmp_path: Path, make: Make) -> None:
    writer = make()
    taken = [writer.take_slot(wait=False) for _ in range(3)]
    assert taken == [0, 1, None]


def test_a_process_that_is_killed_is_replaced_and_the_save_completes(
    tmp_path: Path, make: Make
) -> None:
    lines: list[str] = []
    writer = make(lines=lines)
    save(writer, 1)
    writer.flush(60)
    os.kill(writer.pid, signal.SIGSTOP)  # so that the save is surely not over when it dies
    save(writer, 2)
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.flush(60)
    save(writer, 3)
    assert writer.flush(60)
    writer.close(60)
    assert (writer.restarts, saved(tmp_path)) == (1, [3])
    assert "the process that writes checkpoints died (exit code -9); started again" in lines
    assert "checkpoint of step 2 is complete" in lines


def test_a_save_at_which_every_process_dies_is_given_up(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    absent: list[tuple[str, int]] = []
    writer = make(lines=lines, absent=absent)
    monkeypatch.setattr(writer_process, "_MODULE", "msc.no_such_module")
    os.kill(writer.pid, signal.SIGSTOP)
    save(writer, 1)
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.flush(60)
    assert absent == [("aa", 1)]
    while not writer.broken:
        time.sleep(0.01)
    assert writer.take_slot(wait=True) is None
    assert any("NOTHING IS SAVED" in line for line in lines)


def test_a_process_that_cannot_start_is_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer_process, "_MODULE", "msc.no_such_module")
    with pytest.raises(CommunicationError, match=f"{sys.executable} -m msc.no_such_module"):
        make()
    assert "No module named" in capfd.readouterr().err


def test_storage_that_refuses_does_not_stop_the_run(tmp_path: Path, make: Make) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    lines: list[str] = []
    absent: list[tuple[str, int]] = []
    writer = make(file, lines, absent)
    save(writer, 1)
    assert writer.flush(60)
    assert absent == [("aa", 1)]
    assert writer.written is None
    (line,) = lines
    assert line.startswith("checkpoint of step 1 was not saved: ")
    assert str(file) in line
    assert "training goes on" in line


def test_what_was_handed_over_is_finished_when_the_trainer_is_gone(
    tmp_path: Path, make: Make
) -> None:
    writer = make()
    os.kill(writer.pid, signal.SIGSTOP)
    save(writer, 5)
    process = writer._process
    writer.close(0)  # as the end of the trainer's process closes its side of the pipe
    os.kill(process.pid, signal.SIGCONT)
    process.wait()
    assert saved(tmp_path) == [5]


def test_ranks_that_meet_again_write_a_step_again_elsewhere(tmp_path: Path, make: Make) -> None:
    writer = make()
    save(writer, 1)
    writer.begin("bb")
    save(writer, 1)
    assert writer.flush(60)
    writer.close(60)
    assert saved(tmp_path) == [1]  # one is kept
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-bb"]


def test_the_snapshot_that_counts_is_overwritten_last(make: Make) -> None:
    writer = make()
    save(writer, 1)
    assert writer.flush(60)
    writer.keep(1)
    assert [writer.take_slot(wait=False) for _ in range(2)] == [0, 1]


def test_a_process_that_does_not_listen_stops_nobody(tmp_path: Path, make: Make) -> None:
    writer: Any = make()
    os.kill(writer.pid, signal.SIGSTOP)
    large = {"state": {}, "files": {"history.json": "x" * (1 << 20)}}  # more than a pipe holds

    def ask() -> None:
        for step in (1, 2):
            slot = writer.take_slot(wait=False)
            writer.arena.slots[slot].fill_(step)
            writer.save(step, slot, large)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert not asking.is_alive()
    assert writer.take_slot(wait=False) is None
    os.kill(writer.pid, signal.SIGCONT)
    assert writer.flush(60)
    writer.close(60)  # the older one has been removed then
    assert saved(tmp_path) == [2]


@pytest.mark.parametrize("told", ["", '{"url": "sa'])
def test_a_writer_whose_trainer_is_gone_before_it_began_is_silent(told: str) -> None:
    command = [sys.executable, "-m", "msc.runtime.checkpoint.writer", "0"]
    done = subprocess.run(command, input=told, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
