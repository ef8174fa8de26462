"""What a pipeline writes to the folder of `MSC_DUMP`, and its line per pass.

    dump/00_capture.txt   dump/04_close-partials.txt   dump/index.txt

Every pass that changed something writes the whole program, so that `diff` of two files is what the
passes between them did. Graphs with equal text share one copy. The index lists all passes. No file
holds a time, so that equal inputs give equal dumps.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from msc.ir.passes import Pass, PassRecord

_INDEX = "index.txt"
_LISTED = re.compile(r"(\d\d+_[a-z0-9-]+\.txt)$", re.MULTILINE)


class Dump:
    """The files of one run in `folder`, which it makes; those of an earlier run are removed."""

    def __init__(self, folder: Path, passes: Sequence[Pass]) -> None:
        self._folder = folder
        self._passes = passes
        folder.mkdir(parents=True, exist_ok=True)
        index = folder / _INDEX
        if index.exists():
            for name in _LISTED.findall(index.read_text()):
                (folder / name).unlink(missing_ok=True)
        index.write_text("")

    def start(self, texts: Mapping[str, str]) -> None:
        """Write the program before the first pass."""
        self._write("00_capture.txt", texts)
        self._append(f"{place(0, self._passes)}  the program as captured   00_capture.txt")

    def after(
        self, number: int, record: PassRecord, texts: Mapping[str, str], changed: bool
    ) -> None:
        """Note pass `number`, counted from 1, and write the program if the pass changed it."""
        line = summary(number, self._passes, record)
        if changed:
            name = f"{number:02d}_{record.name}.txt"
            self._write(name, texts)
            line = f"{line}   {name}"
        self._append(line)

    def _write(self, name: str, texts: Mapping[str, str]) -> None:
        (self._folder / name).write_text(program_text(texts))

    def _append(self, line: str) -> None:
        with (self._folder / _INDEX).open("a") as file:
            file.write(line + "\n")


def program_text(texts: Mapping[str, str]) -> str:
    """The graphs of a unit by name, one after the other; equal ones once, under all their names."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    parts = (f"{', '.join(group)}\n{textwrap.indent(text, '  ')}" for text, group in names.items())
    return "\n\n".join(parts) + "\n"


def place(number: int, passes: Sequence[Pass]) -> str:
    """` 4/12`: which pass of how many."""
    total = str(len(passes))
    return f"{number:>{len(total) + 1}}/{total}"


def summary(number: int, passes: Sequence[Pass], record: PassRecord) -> str:
    """` 4/12  close-partials    65 changes   412 -> 477 nodes`, or `no change`."""
    width = max(len(str(each)) for each in passes)
    start = f"{place(number, passes)}  {passes[number - 1]!s:<{width}}"
    if record.changes == 0 and record.nodes_before == record.nodes_after:
        return f"{start}   no change"
    changes = "1 change" if record.changes == 1 else f"{record.changes} changes"
    return f"{start}   {changes}   {record.nodes_before} -> {record.nodes_after} nodes"
