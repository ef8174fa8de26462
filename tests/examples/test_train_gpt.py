"""The example script starts its ranks itself, and runs under torchrun, with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
SIZES = "--steps 2 --batch 4 --layers 2 --hidden 32 --heads 2 --sequence 16 --evaluate 1".split()


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True
    )


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.gloo
def test_both_ways_to_start_give_the_losses_of_one_process(tmp_path: Path) -> None:
    one, own, torchrun = (tmp_path / f"{name}.json" for name in ("one", "own", "torchrun"))
    done = run(SCRIPT, "--mesh", "tp=1", *SIZES, "--json", one)
    assert done.returncode == 0, done.stderr
    dump = tmp_path / "dump"
    done = run(SCRIPT, "--mesh", "tp=2", *SIZES, "--json", own, "--dump", dump)
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss" in done.stderr
    assert "ranks 0, 1: stage0.step.txt" in (dump / "index.txt").read_text()
    assert (dump / "passes" / "index.txt").exists()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*launcher, SCRIPT, "--mesh", "pp=2", *SIZES, "--json", torchrun)
    assert done.returncode == 0, done.stderr
    expected = read(one)
    for file in (own, torchrun):
        found = read(file)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-5)


def test_a_batch_that_does_not_fit_is_one_line() -> None:
    done = run(SCRIPT, "--mesh", "tp=1", "--batch", "3")
    assert done.returncode == 1
    assert done.stderr.startswith("PlanError: The global batch of 3 samples does not split evenly")
    assert "Traceback" not in done.stderr
