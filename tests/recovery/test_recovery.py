"""Runs whose ranks die, freeze, fail and spin go on, and end as undisturbed, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from msc.run_folder import ledger_file
from msc.runtime.diagnosis.ledger import read_ledger
from msc.runtime.recovery.events import read_events
from tests.checkpoint.runs import equal, program

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
STEPS = 12

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def start(
    folder: Path, mesh: str, nproc: int, faults: str, result: str, *options: str, steps: str = "12"
) -> Any:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "msc", "run", "--nproc", str(nproc)]
    command += ["--run", str(folder / f"{result}.run"), *options]
    command += [str(JOB), str(folder), mesh, steps, result, faults]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the programs, and what the undisturbed runs find in "plain.MESH"."""
    made = tmp_path_factory.mktemp("recovery")
    program("dp=2", precision="float64").save(made / "dp=2")
    assert start(made, "dp=2", 2, "", "plain.dp=2").returncode == 0
    return made


def check(folder: Path, mesh: str, result: str, done: Any) -> list[dict[str, Any]]:
    """The run ended as the undisturbed one, bit for bit; its events."""
    assert done.returncode == 0, done.stderr
    whole, found = (torch.load(folder / name) for name in (f"plain.{mesh}", result))
    assert equal(found, whole)
    assert len(found["losses"]) == STEPS
    events = read_events(folder / f"{result}.run")
    assert not [each for each in events if each["event"] == "mismatch"]
    for name in folder.glob("done.*"):
        name.unlink()
    return [each for each in events if each["event"] == "recovered"]


def test_ranks_that_are_killed_are_replaced_by_a_standby(folder: Path) -> None:
    faults = "0@fit@wait,1@5@SIGKILL,0@9@SIGKILL"
    done = start(folder, "dp=2", 2, faults, "killed", "--standby", "1")
    found = check(folder, "dp=2", "killed", done)
    assert [each["replaced"] for each in found] == [[1], [0]], done.stderr
    assert [each["source"] for each in found] == ["memory", "memory"]
    assert [each["generation"] for each in found] == [2, 3]
    assert found[0]["standbys"] == 1
    assert "rank 1 was killed (SIGKILL) in step 6" in done.stderr
    survived, *_ = read_ledger(ledger_file(folder / "killed.run", 0))
    assert survived.noticed_s > 0
    assert min(survived.seconds[name] for name in ("detect", "repair", "repeated")) > 0


def test_all_ranks_at_once_and_again_while_they_come_back(folder: Path) -> None:
    faults = "0@5@SIGKILL,1@5@SIGKILL,1@start@SIGKILL,0@7@SIGKILL"
    done = start(folder, "dp=2", 2, faults, "all")
    found = check(folder, "dp=2", "all", done)
    assert found[0]["replaced"] == [0, 1]
    assert {each["source"] for each in found} == {"memory"}


def test_a_frozen_rank_and_one_that_spins_are_replaced(folder: Path) -> None:
    done = start(folder, "dp=2", 2, "1@5@SIGSTOP,0@9@spin", "frozen")
    found = check(folder, "dp=2", "frozen", done)
    assert [each["replaced"] for each in found] == [[1], [0]]
    assert "rank 1 is frozen (it was stopped) in step 6" in done.stderr
    assert "rank 0 computes, or hangs outside of communication" in done.stderr


def test_in_a_later_fit_all_processes_are_replaced(folder: Path) -> None:
    done = start(folder, "dp=2", 2, "1@9@SIGKILL", "later", steps="6+12")
    found = check(folder, "dp=2", "later", done)
    assert [each["replaced"] for each in found] == [[0, 1]]
    assert [each["source"] for each in found] == ["memory"]


def test_without_replacements_all_go_on_from_storage(folder: Path) -> None:
    done = start(folder, "dp=2", 2, "1@7@raise", "stored", "--replacements", "0")
    found = check(folder, "dp=2", "stored", done)
    assert [each["replaced"] for each in found] == [[0, 1]]
    assert "rank 1 raised ValueError: on purpose in step 8" in done.stderr
    assert "all ranks are started anew, from storage if a step was saved" in done.stderr


def test_a_failure_that_comes_back_ends_the_run_by_name(folder: Path) -> None:
    done = start(folder, "dp=2", 2, "1@5@always", "fails")
    assert done.returncode == 1
    assert "ValueError: on purpose" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "generation 2: rank 1 raised ValueError: on purpose in step 6" in last
    assert "the same failure came back after another try" in last
