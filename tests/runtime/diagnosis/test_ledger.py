"""A ledger: every nanosecond in one class, whatever ends the attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from msc.runtime.diagnosis import ledger as module
from msc.runtime.diagnosis import process_facts
from msc.runtime.diagnosis.ledger import CLASSES, RECORD_BYTES, Attempt, Ledger, read_ledger


class Clock:
    """A clock that goes on when it is told to; both clocks of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5_000_000_000
        monkeypatch.setattr("time.monotonic_ns", lambda: self.now)
        monkeypatch.setattr("time.time_ns", lambda: self.now)
        monkeypatch.setattr(module, "process_age_ns", lambda: 2_000_000_000)
        monkeypatch.setattr(module, "_opened", False)

    def pass_s(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.ledger"


def step(ledger: Ledger, clock: Clock, number: int, done: bool = True) -> None:
    """A step: 1 s of data, 2 s of compute, 3 s of communication, 4 s of copying, 5 s of compute."""
    ledger.begin_step(number)
    for name, seconds in (("data", 1), ("compute", 2), ("communication", 3), ("snapshot", 4)):
        ledger.switch(name)
        clock.pass_s(seconds)
    ledger.switch("compute")
    clock.pass_s(5)
    if done:
        ledger.end_step()


def spent(attempt: Attempt) -> dict[str, float]:
    return {name: seconds for name, seconds in attempt.seconds.items() if seconds}


STEP = {"data": 1.0, "compute": 7.0, "communication": 3.0, "snapshot": 4.0}


def test_every_second_is_in_one_class(file: Path, clock: Clock) -> None:
    ledger = Ledger(file, file)
    clock.pass_s(1)
    ledger.switch("load")
    clock.pass_s(2)
    ledger.switch("idle")
    step(ledger, clock, 1)
    clock.pass_s(0.5)
    ledger.end()
    clock.pass_s(100)  # is not of the run
    (attempt,) = read_ledger(file)
    assert spent(attempt) == {"init": 3.0, "load": 2.0, "idle": 0.5, **STEP}
    assert (attempt.ended, attempt.last, attempt.last_step) == (True, "idle", 1)
    assert attempt.began_s == 3.0  # where the process began
    assert attempt.end_s == attempt.began_s + 20.5


def test_steps_that_were_done_before_are_repeated_work(file: Path, clock: Clock) -> None:
    first = Ledger(file, file)
    step(first, clock, 1)
    step(first, clock, 2)
    first.end()
    second = Ledger(file, file)
    step(second, clock, 2)
    step(second, clock, 3)
    second.end()
    early, late = read_ledger(file)
    assert spent(early) == {"init": 2.0, **{name: 2 * value for name, value in STEP.items()}}
    assert spent(late) == {**STEP, "repeated": 11.0, "snapshot": 8.0}
    assert late.began_s == early.end_s


def test_a_new_rank_knows_from_rank_0_what_was_done(tmp_path: Path, clock: Clock) -> None:
    files = [tmp_path / f"rank-0000{rank}.ledger" for rank in range(2)]
    step(Ledger(files[0], files[0]), clock, 1)
    step(Ledger(files[1], files[0]), clock, 1)
    assert "compute" not in spent(read_ledger(files[1])[0])


def test_a_step_that_is_begun_again_is_repeated_work(file: Path, clock: Clock) -> None:
    """A process may go back to a step without ending."""
    ledger = Ledger(file, file)
    step(ledger, clock, 1, done=False)
    ledger.fail(waited=False)
    clock.pass_s(10)
    step(ledger, clock, 1)
    ledger.end()
    (attempt,) = read_ledger(file)
    assert spent(attempt) == {"init": 2, "repair": 10, **STEP, "snapshot": 8, "repeated": 11}


def test_waiting_for_a_rank_that_is_lost_is_detection(file: Path, clock: Clock) -> None:
    ledger = Ledger(file, file)
    ledger.begin_step(1)
    clock.pass_s(1)
    ledger.switch("communication")
    clock.pass_s(30)
    ledger.fail(waited=True)
    noticed = clock.now / 1e9
    clock.pass_s(2)
    (attempt,) = read_ledger(file)
    assert attempt.noticed_s == noticed
    assert spent(attempt) == {"init": 2.0, "compute": 1.0, "detect": 30.0, "repair": 2.0}


def test_a_running_rank_is_read_as_it_is(file: Path, clock: Clock) -> None:
    ledger = Ledger(file, file)
    ledger.begin_step(1)
    clock.pass_s(7)
    (attempt,) = read_ledger(file)
    assert spent(attempt) == {"init": 2.0, "compute": 7.0}
    assert (attempt.alive, attempt.last, attempt.ended) == ("running", "compute", False)


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from msc.runtime.diagnosis.ledger import Ledger
file = Path(sys.argv[1])
ledger = Ledger(file, file)
ledger.begin_step(1)
ledger.end_step()
ledger.begin_step(2)
time.sleep(0.05)
ledger.switch("communication")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_leaves_what_it_had(file: Path) -> None:
    before = time.time()
    done = subprocess.run([sys.executable, "-c", _KILLED, str(file)], env=dict(os.environ))
    after = time.time()
    assert done.returncode == -signal.SIGKILL
    (attempt,) = read_ledger(file)
    assert (attempt.alive, attempt.last_step, attempt.last) == ("dead", 1, "communication")
    assert attempt.seconds["repeated"] >= 0.05  # of step 2, which is cut off
    assert attempt.seconds["init"] > 0  # the import too: it begins where the process did
    assert before - 0.1 < attempt.began_s < attempt.end_s < after + 0.1


def test_a_record_that_was_cut_off_is_overwritten(file: Path, clock: Clock) -> None:
    Ledger(file, file).end()
    with file.open("ab") as handle:
        handle.write(file.read_bytes()[:100])
    assert len(read_ledger(file)) == 1
    Ledger(file, file).end()
    assert len(read_ledger(file)) == 2
    assert file.stat().st_size == 2 * RECORD_BYTES


def test_another_file_is_refused(file: Path, clock: Clock) -> None:
    assert read_ledger(file) == []
    file.write_bytes(b"MSCRING1" + bytes(RECORD_BYTES))
    with pytest.raises(ValueError, match="no ledger of a rank"):
        read_ledger(file)
    assert len(set(CLASSES)) == 10


def test_a_process_that_has_waited_to_be_a_rank_begins_when_it_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_facts, "_since_ns", None)
    whole = process_facts.process_age_ns()
    process_facts.begin_now()
    assert 0 <= process_facts.process_age_ns() < whole
