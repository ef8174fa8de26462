"""The folder of a run says what its ranks did."""

from __future__ import annotations

from pathlib import Path

import pytest

import msc
from msc.run_folder import diagnose, ledger_files, read_mesh
from msc.run_report import run_accounts
from msc.runtime.diagnosis.ring import read_ring
from tests.checkpoint.runs import trainer


def test_a_run_notes_what_it_does(tmp_path: Path) -> None:
    with trainer(None, run=tmp_path / "run") as run:
        run.fit(1)
        (tmp_path / "run" / "rank-00000.ring").read_bytes()
        verdict, text = diagnose(tmp_path / "run")
        assert (verdict.causes, text.splitlines()[0]) == ((), "No rank waits for another.")
        with pytest.raises(msc.InputError, match="ended at step"):
            with trainer(None, run=tmp_path / "short", data=[]) as short:
                short.fit(1)
    assert read_ring(tmp_path / "run" / "rank-00000.ring").phase == "ended"
    assert read_ring(tmp_path / "short" / "rank-00000.ring").phase == "failed"
    with pytest.raises(msc.UserError, match="is no folder of a run"):
        diagnose(tmp_path)
    ring = tmp_path / "run" / "rank-00000.ring"
    whole = ring.read_bytes()
    for damaged, words in ((b"", "is no ring"), (whole[:-1], "is cut off")):
        ring.write_bytes(damaged)
        with pytest.raises(msc.UserError, match=words):
            diagnose(tmp_path / "run")


def test_a_run_on_fewer_ranks_keeps_the_ledgers_of_all_and_the_rings_of_its_own(
    tmp_path: Path,
) -> None:
    for name in ("rank-00001.ring", "rank-00001.ledger", "rank-12345.ledger"):
        (tmp_path / name).touch()
    with trainer(None, run=tmp_path) as run:
        run.fit(1)
    assert [file.name for file in tmp_path.glob("*.ring")] == ["rank-00000.ring"]
    assert list(ledger_files(tmp_path)) == [0, 1, 12345]
    assert [each.rank for each in run_accounts(tmp_path)] == [0]  # the others have never begun


@pytest.mark.parametrize("text", ["[]", '{"mesh": [["dp"]]}', '{"mesh": [["dp", "two"]]}', "x"])
def test_another_file_of_that_name_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(msc.UserError, match="is no folder of a run"):
        read_mesh(tmp_path)
