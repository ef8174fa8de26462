"""The program after every pass, as files and kept for later."""

from __future__ import annotations

from pathlib import Path

import pytest

import msc
from msc.ir.errors import UserError, VerifyError
from msc.ir.flags import FLAGS
from msc.ir.pipeline import Pipeline, Unit
from tests import models
from tests.ir.simple_passes import BringBack, DropNeg, Reports, Split, aten, chain, forward


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        monkeypatch.delenv(flag.name, raising=False)


def test_the_dump(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dump"
    pipeline = Pipeline([Reports(), DropNeg(), Split()])
    pipeline.run(forward(aten.neg.default), dump=folder)
    files = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    assert files == {
        "00_capture.txt": """\
forward
  %x: f32[2] = input
  %neg_default: f32[2] = aten.neg(%x)
  return (%neg_default,)
""",
        "02_drop-neg.txt": """\
forward
  %x: f32[2] = input
  %neg_default: f32[2] = aten.abs(%x)
  return (%neg_default,)
""",
        "03_split.txt": """\
block.0
  %x: f32[2] = input
  %neg_default: f32[2] = aten.abs(%x)
  return (%neg_default,)

block.1
  %x: f32[2] = input
  %abs_default: f32[2] = aten.abs(%x)
  return (%abs_default,)
""",
        "index.txt": """\
 0/3  the program as captured   00_capture.txt
 1/3  reports{rename=False,number=0}        no change
 2/3  drop-neg{old=aten.neg,new=aten.abs}   1 change   3 -> 3 nodes   02_drop-neg.txt
 3/3  split{number=1}                       1 change   3 -> 6 nodes   03_split.txt
""",
    }


def test_equal_graphs_share_one_copy(tmp_path: Path) -> None:
    graphs = {f"rank.{rank}": chain(aten.neg.default) for rank in range(3)}
    graphs["rank.1"] = chain()
    Pipeline([]).run(Unit(graphs), dump=tmp_path)
    text = (tmp_path / "00_capture.txt").read_text()
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert headings == ["rank.0, rank.2", "rank.1"]


def test_a_dump_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "05_notes.txt").write_text("mine")
    Pipeline([Reports(), DropNeg()]).run(forward(aten.neg.default), dump=tmp_path)
    assert (tmp_path / "02_drop-neg.txt").exists()
    Pipeline([DropNeg()]).run(forward(aten.abs.default), dump=tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["00_capture.txt", "05_notes.txt", "index.txt"]


def test_a_broken_program_is_dumped(tmp_path: Path) -> None:
    """The file of the pass that broke the program is the one that somebody wants to read."""
    with pytest.raises(VerifyError):
        Pipeline([BringBack(new=aten.neg_.default)]).run(forward(aten.exp.default), dump=tmp_path)
    assert "aten.neg_(%x)" in (tmp_path / "01_bring-back.txt").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_dump_is_kept_and_can_be_written_later(tmp_path: Path) -> None:
    unit = forward(aten.neg.default)
    Pipeline([Reports(), DropNeg(), Split()]).run(unit, dump=tmp_path / "during")
    assert unit.dump is not None
    (tmp_path / "after").mkdir()
    (tmp_path / "after" / "mine.txt").write_text("stays")
    unit.dump.write(tmp_path / "after")
    found = contents(tmp_path / "after")
    assert found.pop("mine.txt") == b"stays"
    assert found == contents(tmp_path / "during")


def test_a_program_dumps_the_result_of_every_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSC_DUMP", str(tmp_path / "during"))
    program = msc.compile(models.GPT(), models.tokens(), mesh="pp=2,tp=2")
    program.dump(tmp_path / "program")
    assert "passes/index.txt" in (tmp_path / "program" / "index.txt").read_text()
    found = contents(tmp_path / "program" / "passes")
    assert {"00_capture.txt", "index.txt"} < set(found)
    assert any(name.endswith("_shard.txt") for name in found)
    assert found == contents(tmp_path / "during")
    program.save(tmp_path / "saved")
    msc.load(tmp_path / "saved").dump(tmp_path / "loaded")
    assert not (tmp_path / "loaded" / "passes").exists()
    assert (tmp_path / "loaded" / "stage0.step.txt").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match=r"file' cannot be made: File exists\. Name a folder"):
        Pipeline([]).run(forward(), dump=file)
    assert file.read_text() == "mine"
