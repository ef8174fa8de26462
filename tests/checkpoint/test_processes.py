"""Real ranks that are killed go on from what was saved, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from msc.run_folder import diagnose
from msc.run_report import run_accounts
from msc.runtime.diagnosis.ring import read_ring
from msc.runtime.diagnosis.schedule import WAIT, from_text
from tests.checkpoint.runs import equal, folders, program

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")


def start_rank(folder: Path, rank: int, port: int, case: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, str(JOB), str(folder), "2", case]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


@pytest.mark.gloo
@pytest.mark.skipif("MSC_TEST_LONG" not in os.environ, reason="takes minutes")
def test_a_job_that_is_killed_again_and_again_ends_bit_for_bit(tmp_path: Path) -> None:
    program("dp=2", precision="float64", microbatches=2).save(tmp_path / "dp=2")
    run_job(tmp_path, 2, ["plain:60:dp=2"])
    chance = random.Random(0)
    lives = []
    for life in range(40):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        ranks = [start_rank(tmp_path, rank, port, "killed:60:dp=2") for rank in range(2)]
        known = set(folders(tmp_path / "killed")) if life else set()
        while ranks[0].poll() is None:
            new = (tmp_path / "killed").exists() and set(folders(tmp_path / "killed")) - known
            if new:  # it runs
                time.sleep(chance.random() * 0.8)
                break
            time.sleep(0.01)
        for rank in chance.sample(ranks, 2):
            if life < 39:
                rank.kill()
                time.sleep(chance.random() * 0.05)
        codes = [rank.wait() for rank in ranks]
        lives.append(codes)
        if codes == [0, 0]:
            break
    assert codes == [0, 0], lives
    assert len(lives) > 2
    whole, found = (torch.load(tmp_path / f"{name}.dp=2.pt") for name in ("plain", "killed"))
    assert equal(found["params"], whole["params"])
    assert equal(found["optimizer"], whole["optimizer"])
    assert found["losses"] == whole["losses"]


def run_job(folder: Path, nproc: int, cases: Sequence[str], code: int = 0) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(JOB), str(folder), str(nproc), *cases]
    done = subprocess.run(
        command,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, done.stdout


def assert_as_scheduled(run: Path) -> None:
    """Each rank's last step is what its program says, act for act, byte for byte."""
    for rank in range(2):
        view = read_ring(run / f"rank-{rank:05d}.ring")
        schedule = from_text((run / f"rank-{rank:05d}.schedule.json").read_text())
        assert (view.phase, view.in_step) == ("ended", len(schedule))
        for record, act in zip(view.records[-view.in_step :], schedule, strict=True):
            assert (record.kind, record.channel) == (act.kind, act.channel)
            assert record.kind == WAIT or record.nbytes == act.nbytes
            assert record.leave_ns >= record.enter_ns > 0


@pytest.mark.gloo
def test_a_killed_job_resumes_bit_for_bit_and_on_another_mesh(tmp_path: Path) -> None:
    for mesh in ("dp=2", "pp=2"):
        program(mesh, precision="float64", microbatches=2).save(tmp_path / mesh)
    run_job(tmp_path, 2, ["plain:5:dp=2", "same:3:dp=2:kill=1"], code=1)
    killed, words = diagnose(tmp_path / "same.dp=2.run")
    assert [(cause.rank, cause.what) for cause in killed.causes] == [(1, "is dead")], words
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    run_job(tmp_path, 2, ["same:5:dp=2", "other:5:pp=2"])
    whole, same, other = (
        torch.load(tmp_path / f"{name}.pt") for name in ("plain.dp=2", "same.dp=2", "other.pp=2")
    )
    assert same["first"] == other["first"] == 2
    assert equal(same["params"], whole["params"])
    assert equal(same["optimizer"], whole["optimizer"])
    assert same["losses"] == whole["losses"]
    assert other["losses"] == pytest.approx(whole["losses"], rel=1e-12)
    for name, value in whole["params"].items():
        torch.testing.assert_close(other["params"][name], value, rtol=1e-9, atol=1e-12)
    for account in run_accounts(tmp_path / "same.dp=2.run"):
        assert (account.attempts, account.last_step) == (2, 5)
        seconds = account.seconds
        assert sum(seconds.values()) == pytest.approx(account.wall_s, rel=1e-9)
        lost = seconds["detect"] + seconds["repair"]
        assert lost > 0
        for name in ("init", "load", "compute", "communication", "snapshot", "repeated"):
            assert seconds[name] > 0, name  # step 3 was done before, and not saved
    for name in ("plain.dp=2", "other.pp=2"):
        assert diagnose(tmp_path / f"{name}.run")[0].causes == ()
        assert_as_scheduled(tmp_path / f"{name}.run")
    # both dp ranks need all of it: one reads, the other is sent it
    (folder,) = (
        path for path in (tmp_path / "same").iterdir() if path.name.startswith("step-00000002")
    )
    size = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    assert same["read"] == [size, size]


@pytest.mark.gloo
def test_data_that_is_loaded_inside_of_steps_goes_on_where_it_was(tmp_path: Path) -> None:
    """With ZeRO a step begins before its batch is loaded."""
    program("dp=2", precision="float64", zero=1).save(tmp_path / "zero1")
    run_job(tmp_path, 2, ["plain:5:zero1", "same:3:zero1", "same:5:zero1"])
    whole, same = (torch.load(tmp_path / f"{name}.zero1.pt") for name in ("plain", "same"))
    assert same["first"] == 2
    assert same["losses"] == whole["losses"]
    assert equal(same["params"], whole["params"])
    assert equal(same["optimizer"], whole["optimizer"])
    for folder in (tmp_path / "same").iterdir():
        commit = json.loads((folder / "commit.json").read_text())
        assert commit["state"]["data"] == {"at": commit["step"]}
    verdict, words = diagnose(tmp_path / "plain.zero1.run")
    assert verdict.causes == (), words
    assert_as_scheduled(tmp_path / "plain.zero1.run")


@pytest.mark.gloo
def test_every_rank_tells_inside_of_fit_what_happened_to_its_saves(tmp_path: Path) -> None:
    program("dp=2", precision="float64").save(tmp_path / "dp=2")
    run_job(tmp_path, 2, ["told:3:dp=2:writer=1", "skips:8:dp=2:stopped=1"])
    first, second = torch.load(tmp_path / "told.dp=2.pt")["lines"]
    assert not any("died" in line for line in first)
    (line,) = (line for line in second if "died" in line)
    assert line.endswith("process that writes checkpoints died (exit code -9); started again")
    assert line.startswith("Rank 1 (dp=1): ")
    first, second = torch.load(tmp_path / "skips.dp=2.pt")["lines"]
    for step in (6, 8):  # its two copies are those of steps 2 and 4
        assert f"checkpoint of step {step} is skipped: both copies" in "".join(second)
        # rank 0 does not wait for what will not come
        line = f"Rank 0 (dp=0): checkpoint of step {step} stays incomplete: rank 1 did not save it"
        assert line in first
