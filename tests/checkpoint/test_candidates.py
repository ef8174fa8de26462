"""No run goes on from what is damaged, or from a run that is not its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import msc
from tests.checkpoint.job import Rows, tokens
from tests.checkpoint.runs import equal, findings, folders, program, trainer


def newest(folder: Path, back: int = 0) -> Path:
    return folder / folders(folder)[-1 - back]


def test_the_newest_intact_one_is_taken(saved: Path, undisturbed: dict[str, Any]) -> None:
    data = newest(saved) / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    lines: list[str] = []
    with trainer(saved, log=lines.append) as run:
        assert run.step == 2
        run.fit(3)
        assert equal(findings(run), undisturbed)
    (line,) = [line for line in lines if "damaged" in line]
    assert f"checkpoint {data.parent.name} is damaged and not used: __0_0.distcp: bytes" in line


def test_incomplete_and_mixed_ones_are_named(saved: Path) -> None:
    (newest(saved) / "commit.json").unlink()
    mixed = newest(saved, 1) / "part-00000.json"
    mixed.write_bytes((newest(saved, 2) / "part-00000.json").read_bytes())
    lines: list[str] = []
    with trainer(saved, log=lines.append) as run:
        assert run.step == 1
    assert f"checkpoint {newest(saved).name} is incomplete and not used" in lines[0]
    assert "part-00000.json is not what was committed" in lines[1]


def test_no_run_starts_over_beside_damaged_checkpoints(saved: Path) -> None:
    for folder in saved.iterdir():
        (folder / "history.json").write_text("{}")
    with pytest.raises(msc.UserError, match=r"No checkpoint in .* is intact") as error:
        trainer(saved)
    assert str(error.value).count("history.json is not what was committed") == 3
    assert not torch.distributed.is_initialized()


def test_incomplete_ones_alone_are_no_run(saved: Path) -> None:
    for folder in saved.iterdir():
        (folder / "commit.json").unlink()
    with trainer(saved) as run:
        assert run.step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "The seed is 1, and .* has a run with seed 0"),
        ({"data": Rows(2)}, "The data differs from that of the checkpoint"),
        ({"data": [tokens()] * 2}, "The data differs from that of the checkpoint"),
    ],
)
def test_another_run_is_refused(saved: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(msc.UserError, match=message):
        trainer(saved, **options)


def test_another_optimizer_is_refused(saved: Path) -> None:
    with pytest.raises(msc.UserError, match="another model, optimizer or precision"):
        trainer(saved, program=program(optimizer=msc.SGD(lr=0.1)))
