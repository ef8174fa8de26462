"""What joining a job takes: one connection to the store, and the groups that the program uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("startup_job.py")


@pytest.mark.gloo
def test_a_rank_connects_once_and_makes_the_groups_of_its_program_alone(tmp_path: Path) -> None:
    meshes = ["dp=2", "pp=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path), *meshes],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for mesh in meshes:
        for rank in range(2):
            found = json.loads((tmp_path / f"{mesh}.{rank}.json").read_text())
            assert found["made"] == found["used"], mesh
            if mesh == meshes[0]:
                assert found["connections"] == 1
