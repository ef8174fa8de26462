"""Promises of the documentation that can rot: tables held to the code."""

from __future__ import annotations

import re
from pathlib import Path

from msc.ir.flags import FLAGS
from msc.passes.pipelines import TRAIN

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_flag_stands_in_the_table_with_its_sentence() -> None:
    rows = {row[0].strip("`"): row[1] for row in _rows(ARCHITECTURE) if row[0].startswith("`MSC_")}
    assert rows == {flag.name: flag.help for flag in FLAGS}


def test_the_passes_stand_in_the_table_in_their_order() -> None:
    section = ARCHITECTURE.split("## The pipeline")[1].split("\n## ")[0]
    named = [name for row in _rows(section)[2:] for name in row[0].split(", ")]
    assert tuple(named) == TRAIN.names


def test_files_that_the_pages_name_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        text = (ROOT / page).read_text()
        for name in re.findall(
            r"`((?:msc|passes|codegen|runtime|tests|examples|benchmarks|docs)/[^`*<> ]+)`", text
        ):
            assert (ROOT / name.rstrip("/")).exists(), f"{page} names {name}"
