"""A run goes on with fewer ranks where one cannot be replaced, and grows back when it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import msc
from msc.ir.errors import InputError
from msc.launch import launch
from msc.run_folder import diagnose
from msc.run_report import report_text, run_accounts
from msc.runtime.recovery.events import read_events
from tests.checkpoint.job import Rows
from tests.recovery import growth, growth_job

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parents[2]
JOB = Path(growth_job.__file__)


def start(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "msc", "run", "--nproc", "4", "--run", str(folder / "run")]
    command += [*options, str(JOB), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_four_ranks_become_two_and_four_again(tmp_path: Path) -> None:
    done = start(tmp_path, "--min-ranks", "2")
    assert done.returncode == 0, done.stderr
    assert "rank 3 ended with exit code 9; it cannot be replaced" in done.stderr
    text = "goes on with 2 of 4 ranks without slot 3 of node 0: dp 4 -> 2, micro-batches 1 -> 2"
    assert text in done.stderr
    assert "goes on with 4 of 4 ranks: dp 2 -> 4, micro-batches 2 -> 1" in done.stderr
    events = read_events(tmp_path / "run")
    assert [each["ranks"] for each in events if each["event"] == "ranks"] == [2, 4]
    assert not [each for each in events if each["event"] == "mismatch"]

    lines = (tmp_path / "ranks").read_text().splitlines()
    steps = [tuple(map(int, line.split())) for line in lines]
    assert {rows for _, ranks, rows in steps if ranks == 2} == {4}
    fewer = [step for step, ranks, _ in steps if ranks == 2]
    assert min(fewer) >= growth.BREAKS - 3  # at most the steps between two saves are lost
    back = steps[steps.index((max(fewer), 2, 4)) + 1 :]
    assert [(step, ranks) for step, ranks, _ in back] == [
        (step, 4) for step in range(max(fewer) + 1, growth.STEPS)
    ]  # nothing is taken twice when it grows

    found = torch.load(tmp_path / "found")
    with msc.Trainer(growth.build(""), Rows(), log=False) as whole:
        whole.fit(growth.STEPS)
        expected = {
            "losses": torch.tensor(whole.losses),
            "norms": torch.tensor(whole.grad_norms),
            **whole.state_dict(),
        }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max() / value.abs().max()) < 1e-12, name

    accounts = run_accounts(tmp_path / "run")
    assert [each.rank for each in accounts] == [0, 1, 2, 3]
    assert accounts[3].seconds["repair"] > accounts[0].seconds["repair"]
    assert f"ranks: 4, steps: {growth.STEPS}" in report_text(accounts)
    assert diagnose(tmp_path / "run")[0].causes == ()


def test_ranks_that_cannot_be_are_told() -> None:
    with pytest.raises(InputError, match="min_ranks is 5; it is from 1 to 4"):
        launch([__file__], 4, min_ranks=5)
