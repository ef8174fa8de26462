"""`msc doctor`, alone and in a job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import msc
from msc import doctor
from msc.cli import app
from msc.runtime.doctor.check import Check, failed, passed
from msc.runtime.doctor.exclude import read_excluded
from msc.runtime.doctor.reference import load_reference

ROOT = Path(__file__).parents[1]


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.gloo
def test_a_machine_and_its_reference(tmp_path: Path) -> None:
    reference = tmp_path / "reference.json"
    options = ["--storage", str(tmp_path), "--write-reference", str(reference)]
    process = start("-m", "msc", "doctor", "--quick", "--json", *options)
    printed, words = process.communicate()
    found = json.loads(printed)
    assert set(found["failed"]) <= {"names"}, words  # a resolver may be slow just then
    (checks,) = found["machines"].values()
    status = {check["name"]: check["status"] for check in [*checks, *found["between"]]}
    assert status == {
        "devices": "pass",
        "interfaces": status["interfaces"],  # a machine without a network has none
        "names": status["names"],
        "memory": "measured",
        "loopback": "measured",
        "gemm cpu": "pass",
        f"storage {tmp_path}": "pass",
        "versions": "pass",
        "clocks": "pass",
        "pairs": "pass",
        "all-to-all": "pass",
        "all-reduce": "pass",
    }
    assert load_reference(reference, quick=True)["gemm cpu"].values
    with pytest.raises(msc.UserError, match="was written with --quick"):
        load_reference(reference, quick=False)
    told = json.loads(reference.read_text())
    told["machine"]["cores"] += 1
    reference.write_text(json.dumps(told))
    with pytest.raises(msc.UserError, match="is of another kind of machine"):
        load_reference(reference, quick=True)


@pytest.mark.gloo
def test_every_machine_of_a_job_is_checked_once() -> None:
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        start("-m", "msc", "doctor", "--quick", "--json", RANK=rank, LOCAL_RANK=rank, **place)
        for rank in ("0", "1")
    ]
    (first, words), (second, _) = [rank.communicate() for rank in ranks]
    found = json.loads(first)
    assert set(found["failed"]) <= {"names"}, words
    assert second == ""
    assert len(found["machines"]) == 1
    assert [check["status"] for check in found["between"]] == ["pass"] * 5


def test_failures_are_named_and_their_host_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [doctor.Machine("node0", [failed("gemm cpu", "1 element is wrong")])]
    between = [passed("versions"), failed("pairs", "arrived changed", (1,))]

    def found(*_: Any) -> tuple[list[doctor.Machine], list[Check], list[str]]:
        return machines, between, ["node0", "node1"]

    monkeypatch.setattr(doctor, "run_alone", found)
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "excluded.json"
    shown = CliRunner().invoke(app, ["doctor", "--quick", "--exclude", str(file)])
    assert shown.exit_code == 1
    assert "failed: gemm cpu, pairs" in shown.stdout
    assert {host: entry["reasons"] for host, entry in read_excluded(file).items()} == {
        "node0": ["gemm cpu: 1 element is wrong"],
        "node1": ["pairs: arrived changed"],
    }


def test_nobody_is_blamed_by_a_guess() -> None:
    between = [failed("all-reduce", "all sums are wrong")]
    assert doctor.blamed_hosts([], between, ["node0", "node1"]) == {}
    assert doctor.blamed_hosts([], between, ["node0", "node0"]) == {
        "node0": ["all-reduce: all sums are wrong"]
    }


@pytest.mark.parametrize("text", [None, "[]", '{"machine": 1, "quick": true, "checks": {"a": 1}}'])
def test_what_is_no_reference_is_told(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "reference.json"
    if text is not None:
        file.write_text(text)
    shown = CliRunner().invoke(app, ["doctor", "--reference", str(file)])
    assert shown.exit_code == 2
    assert "is no reference of msc doctor" in shown.stderr


@pytest.mark.parametrize("option", ["--exclude", "--write-reference"])
def test_a_file_that_cannot_be_written_is_told_before_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(doctor, "run_alone", lambda *_: pytest.fail("checks have begun"))
    monkeypatch.delenv("RANK", raising=False)
    shown = CliRunner().invoke(app, ["doctor", option, str(tmp_path / "none" / "file.json")])
    assert shown.exit_code == 2
    assert "there is no folder" in shown.stderr


@pytest.mark.parametrize("name", ["MASTER_PORT", "WORLD_SIZE"])
def test_ranks_that_cannot_meet_are_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "1"}
    for each, value in place.items():
        monkeypatch.setenv(each, value)
    monkeypatch.delenv(name)
    shown = CliRunner().invoke(app, ["doctor", "--quick"])
    assert shown.exit_code == 2
    assert "ranks of the job cannot meet" in shown.stderr
    assert f"{name} expected" in shown.stderr
