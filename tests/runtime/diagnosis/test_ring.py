"""The ring in its file: what is read is what was done, also of a process that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from msc.runtime.diagnosis.ring import Ring, read_ring
from msc.runtime.diagnosis.schedule import WAIT

CHANNELS = ["tp:0,1", "forward:0>2"]


def test_what_was_done_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rank.ring"
    ring = Ring(file, 3, CHANNELS)
    ring.phase("data", 5)
    ring.phase("step")
    first = ring.start("all_reduce", "tp:0,1", 100)
    second = ring.start("send", "forward:0>2", 20)
    ring.leave(ring.enter(second))
    ring.enter(first)
    view = read_ring(file)
    assert (view.rank, view.alive, view.phase, view.step) == (3, "running", "step", 5)
    found = [(r.kind, r.channel, r.sequence, r.nbytes, bool(r.leave_ns)) for r in view.records]
    assert found == [
        ("all_reduce", "tp:0,1", 0, 100, True),
        ("send", "forward:0>2", 0, 20, True),
        (WAIT, "forward:0>2", 0, 0, True),
        (WAIT, "tp:0,1", 0, 0, False),
    ]
    assert view.open_wait == view.records[-1]
    assert (view.in_step, view.started) == (4, {"tp:0,1": 1, "forward:0>2": 1})


def test_counts_outlive_records(tmp_path: Path) -> None:
    file = tmp_path / "rank.ring"
    ring = Ring(file, 0, CHANNELS, capacity=4)
    ring.start("send", "forward:0>2", 1)
    for step in range(1, 11):
        ring.phase("data", step)
        ring.leave(ring.enter(ring.start("all_gather", "tp:0,1", step)))
    view = read_ring(file)
    assert view.started == {"tp:0,1": 10, "forward:0>2": 1}
    assert [record.sequence for record in view.records] == [8, 8, 9, 9]
    assert (view.in_step, view.open_wait) == (2, None)


def test_a_ring_tells_how_its_process_is(tmp_path: Path) -> None:
    file = tmp_path / "rank.ring"
    script = (
        "import pathlib, time\n"
        "from msc.runtime.diagnosis.ring import Ring\n"
        f"ring = Ring(pathlib.Path({str(file)!r}), 1, {CHANNELS!r})\n"
        "ring.enter(ring.start('all_reduce', 'tp:0,1', 8))\n"
        "print('here', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_ring(file).alive == "running"
        os.kill(process.pid, signal.SIGSTOP)
        while read_ring(file).alive == "running":
            pass  # the signal is on its way
        assert read_ring(file).alive == "stopped"
        process.kill()
    view = read_ring(file)
    assert view.alive == "dead"
    assert view.open_wait is not None


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no ring" * 100)
    with pytest.raises(ValueError, match="is no ring of a rank"):
        read_ring(tmp_path / "x")
