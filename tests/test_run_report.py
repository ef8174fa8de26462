"""`msc report` says where a run's time went."""

from __future__ import annotations

import errno
import gc
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from msc.cli import app
from msc.run_folder import ledger_file
from msc.run_report import report_json, run_accounts
from msc.runtime.diagnosis.ring import read_ring
from tests.checkpoint.runs import trainer


def test_a_run_is_accounted_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    began = time.time()
    with trainer(tmp_path / "saves", run=run) as first:
        first.fit(2)
    with trainer(tmp_path / "saves", run=run) as second:
        assert second.step == 2
        second.fit(1)
        second.evaluate(second._run.batches._data, 1)
    elapsed = time.time() - began
    (account,) = run_accounts(run)
    assert (account.attempts, account.last_step) == (2, 3)
    assert account.wall_s == pytest.approx(sum(account.seconds.values()), rel=1e-9)
    # it has one clock from the first ring to the end of the second trainer
    inside = account.wall_s - account.seconds["init"]
    assert 0 < inside < elapsed
    spent = {name for name, seconds in account.seconds.items() if seconds}
    assert spent == {"init", "load", "compute", "data", "snapshot", "idle"}
    assert report_json([account])["worst_rank"] == 0

    shown = CliRunner().invoke(app, ["report", str(run)])
    assert shown.exit_code == 0
    assert "ranks: 1, steps: 3, attempts: 2, " in shown.stdout
    assert "effective training time" in shown.stdout
    printed = json.loads(CliRunner().invoke(app, ["report", str(run), "--json"]).stdout)
    assert printed["mean"] == dict(account.seconds)
    assert printed["ranks"][0]["steps"] == 3


def test_steps_from_the_start_again_are_repeated_work(tmp_path: Path) -> None:
    for steps in (2, 3):
        with trainer(None, run=tmp_path) as run:
            run.fit(steps)
    (account,) = run_accounts(tmp_path)
    assert account.seconds["repeated"] > 0
    assert account.last_step == 3


def test_a_rank_without_a_ledger_is_named(tmp_path: Path) -> None:
    with trainer(None, run=tmp_path) as run:
        run.fit(1)
    facts = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**facts, "mesh": [["dp", 3]]}))
    whole = ledger_file(tmp_path, 0).read_bytes()
    ledger_file(tmp_path, 1).write_bytes(whole[:-1])
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert shown.exit_code == 0
    assert "ranks: 1," in shown.stdout
    assert "ranks 1, 2 are not in it: no ledger, or one that is cut short" in shown.stdout
    shown = CliRunner().invoke(app, ["report", "--json", str(tmp_path)])
    assert json.loads(shown.stdout)["without_account"] == [1, 2]


def test_a_script_need_not_close_its_trainer(tmp_path: Path) -> None:
    run = trainer(None, run=tmp_path)
    run.fit(1)
    assert read_ring(tmp_path / "rank-00000.ring").phase == "idle"
    job = run._run.job
    del run
    gc.collect()
    job.close()  # which the end of a process does
    assert read_ring(tmp_path / "rank-00000.ring").phase == "ended"


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert shown.exit_code == 2
    assert "is no folder of a run" in shown.stderr
    with trainer(None, run=tmp_path):
        pass
    ledger_file(tmp_path, 0).write_bytes(b"something else")
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "is no ledger of a rank" in shown.stderr
    ledger_file(tmp_path, 0).unlink()
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "No rank has begun the run" in shown.stderr


def test_a_disk_without_room_for_notes_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with trainer(None, run=tmp_path) as run:
        run.fit(1)
        assert len(run.losses) == 1
    assert "nothing is noted for msc blame and msc report: [Errno 28]" in capsys.readouterr().err
