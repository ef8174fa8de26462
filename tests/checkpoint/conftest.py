"""Runs that several tests compare with, or start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import findings, folders, trainer


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, Any]:
    with trainer(None) as run:
        run.fit(5)
        return findings(run)


@pytest.fixture
def saved(tmp_path: Path, of_three_steps: Path) -> Path:
    """A folder with the checkpoints of steps 1 to 3."""
    shutil.copytree(of_three_steps, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture(scope="session")
def of_three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    with trainer(folder) as run:
        run.fit(3)
    assert len(folders(folder)) == 3
    return folder
