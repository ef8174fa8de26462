"""The fault campaign: every kind once, some flipped bits, and what the repository says of more."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fault_kinds.helper import connections
from benchmarks.fault_kinds.kinds import KINDS, NAMES, Expected
from benchmarks.fault_kinds.runs import FIRST, RUNS, last_step, plan

ROOT = Path(__file__).parents[2]


@pytest.mark.gloo
def test_a_run_comes_through_every_kind_of_fault(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    words = [str(ROOT / "benchmarks" / "faults.py"), "--each", "1", "--flips", "20"]
    words += ["--keep", str(tmp_path / "runs"), "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert file.exists(), done.stderr
    facts = json.loads(file.read_text())
    rows = {row["kind"]: row for row in facts["kinds"]}
    assert rows.keys() == NAMES.keys()
    for name, row in rows.items():
        if "not_made" in row:  # a machine that permits no namespaces
            assert NAMES[name].run == "machine"
            continue
        assert not row["problems"], f"{name}: {row['problems']}"
        assert row["injected"] == row["detected"] == row["recovered"] == 1, name
        ends_early = NAMES[name].expected is Expected.ENDS
        assert row["bit_identical"] == (None if ends_early else 1), name
    assert facts["flips"]["found"] == facts["flips"]["refused"] == 20
    assert done.returncode == 0, done.stdout


def test_the_results_have_every_kind_and_none_that_failed() -> None:
    facts = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())
    rows = {row["kind"]: row for row in facts["kinds"]}
    assert rows.keys() == NAMES.keys()
    for name, row in rows.items():
        assert row["injected"] == row["detected"] == row["recovered"] > 0, name
        assert row["bit_identical"] in (None, row["injected"]), name
    assert facts["flips"]["found"] == facts["flips"]["refused"] == facts["flips"]["flips"]
    assert facts["chaos"]["bit_identical"]


def test_a_plan_gives_each_fault_room_and_chains_what_happens_while_one_is_mended() -> None:
    kinds = [kind for kind in KINDS if kind.run == "pipeline"]
    faults = plan(kinds, RUNS["pipeline"].ranks, random.Random(0))
    assert [fault["kind"] for fault in faults] == [kind.name for kind in kinds]
    steps = [fault["step"] for fault in faults if fault["step"] >= 0]
    assert steps[0] == FIRST
    assert all(later - sooner >= 7 for sooner, later in itertools.pairwise(steps))
    assert last_step(faults) >= steps[-1] + 7
    chained = [fault for fault in faults if NAMES[fault["kind"]].chained]
    assert all(fault["after"] == fault["number"] - 1 for fault in chained)


def test_connections_between_two_processes_are_found() -> None:
    code = (
        "import socket, sys; made = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
        "made.recv(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen([sys.executable, "-S", "-c", code, str(port)]) as other:
            accepted, (_, theirs) = server.accept()
            assert connections(os.getpid(), other.pid) == {(port, theirs)}
            accepted.close()
