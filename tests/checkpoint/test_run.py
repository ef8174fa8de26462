"""A run that is saved resumes bit for bit, and saving changes nothing of it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import msc
from msc.runtime.checkpoint.loading import Loader
from tests.checkpoint.runs import equal, findings, folders, trainer


def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_interrupted(
    saved: Path, undisturbed: dict[str, Any]
) -> None:
    lines: list[str] = []
    with trainer(saved, log=lines.append) as run:
        assert run.step == 3
        assert run.losses == undisturbed["losses"][:3]
        run.fit(2)
        assert equal(findings(run), undisturbed)
    assert any("resumed from step 3" in line for line in lines)
    assert [name.split("-")[1] for name in folders(saved)] == ["00000003", "00000004", "00000005"]


def test_saving_changes_nothing(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    with trainer(tmp_path, settings={"every": 2}) as run:
        run.fit(5)
        assert equal(findings(run), undisturbed)
        run.save()
        assert [name.split("-")[1] for name in folders(tmp_path)] == [
            "00000002",
            "00000004",
            "00000005",
        ]
        run.save()
        assert len(folders(tmp_path)) == 3


def test_a_writer_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    with trainer(tmp_path, log=lines.append) as run:
        run.fit(1)
        assert run._run.checkpoints is not None
        os.kill(run._run.checkpoints.writer.pid, signal.SIGKILL)
        run.fit(2)
        run.save()
    assert [name.split("-")[1] for name in folders(tmp_path)] == [
        "00000001",
        "00000002",
        "00000003",
    ]
    assert any("died (exit code -9); started again" in line for line in lines)


def test_a_save_is_skipped_when_both_copies_are_being_written(tmp_path: Path) -> None:
    lines: list[str] = []
    with trainer(tmp_path, log=lines.append, settings={"when_busy": "skip"}) as run:
        assert run._run.checkpoints is not None
        writer = run._run.checkpoints.writer
        os.kill(writer.pid, signal.SIGSTOP)
        run.fit(4)
        os.kill(writer.pid, signal.SIGCONT)
    assert [name.split("-")[1] for name in folders(tmp_path)] == ["00000001", "00000002"]
    busy = [line.partition(": ")[2] for line in lines if "skipped" in line]
    assert busy == [
        f"checkpoint of step {step} is skipped: both copies are being written" for step in (3, 4)
    ]


def test_saves_by_the_clock(tmp_path: Path) -> None:
    with trainer(tmp_path, settings={"every": timedelta(microseconds=1)}) as run:
        run.fit(4)
    assert [name.split("-")[1] for name in folders(tmp_path)] == [
        "00000002",
        "00000003",
        "00000004",
    ]


def test_any_file_system_of_fsspec(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    url: Any = f"local://{tmp_path}/saves"  # the same disk, but through fsspec
    with trainer(url) as run:
        run.fit(3)
    with trainer(url) as run:
        assert run.step == 3
        run.fit(2)
        assert equal(findings(run), undisturbed)


def test_a_rank_that_dies_while_loading_is_named(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Loader, target: Any) -> None:
        raise RuntimeError("[transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(Loader, "load", lost)
    with pytest.raises(msc.CommunicationError, match="Rank 0 got no answer from another rank"):
        trainer(saved)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folder_that_can_never_be_made_is_refused_at_once(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(msc.UserError, match=r"cannot be saved in .*file.*can be made"):
        trainer(tmp_path / "file" / below)
