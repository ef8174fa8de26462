"""What every pass of a pipeline made, as text: kept with the program, and written to `MSC_DUMP`.

    dump/00_capture.txt   dump/04_close-partials.txt   dump/index.txt

Every pass that changed something has the whole program, so that `diff` of two files is what the
passes between them did. Graphs with equal text share one copy. The index lists all passes. No file
holds a time, so that equal inputs give equal dumps.
"""

from __future__ import annotations

import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from msc.ir.errors import UserError
from msc.ir.passes import Pass, PassRecord

_INDEX = "index.txt"
_LISTED = re.compile(r"(\d\d+_[a-z0-9-]+\.txt)$", re.MULTILINE)


class Dump:
    """The program after each pass, compressed; also files in `folder`, if given, as passes run.

    The folder is made; files of an earlier dump in it are removed.
    """

    def __init__(self, passes: Sequence[Pass], folder: Path | None = None) -> None:
        self._passes = passes
        self._folder = folder
        self._files: dict[str, bytes] = {}
        self._lines: list[str] = []
        if folder is not None:
            _clear(folder)

    def start(self, texts: Mapping[str, str]) -> None:
        """Note the program before the first pass."""
        self._keep("00_capture.txt", program_text(texts))
        self._list(f"{place(0, self._passes)}  the program as captured   00_capture.txt")

    def after(
        self,
        number: int,
        record: PassRecord,
        texts: Mapping[str, str],
        changed: bool,
        remarks: Sequence[str] = (),
    ) -> None:
        """Note pass `number`, counted from 1, what it has to say, and the program if it changed."""
        line = summary(number, self._passes, record)
        if changed:
            name = f"{number:02d}_{record.name}.txt"
            said = "".join(f"# {remark}\n" for remark in remarks)
            self._keep(name, said + program_text(texts))
            line = f"{line}   {name}"
        self._list(line)
        for remark in remarks:
            self._list(f"        {remark}")

    def write(self, folder: Path) -> None:
        """Write all files to another folder."""
        _clear(folder)
        for name, packed in self._files.items():
            (folder / name).write_bytes(zlib.decompress(packed))
        (folder / _INDEX).write_text("".join(self._lines))

    def _keep(self, name: str, text: str) -> None:
        data = text.encode()
        self._files[name] = zlib.compress(data, 1)
        if self._folder is not None:
            (self._folder / name).write_bytes(data)

    def _list(self, line: str) -> None:
        self._lines.append(line + "\n")
        if self._folder is not None:
            (self._folder / _INDEX).write_text("".join(self._lines))


def _clear(folder: Path) -> None:
    """Make a folder for a dump, without the files of an earlier one."""
    make_folder(folder)
    index = folder / _INDEX
    if index.exists():
        for name in _LISTED.findall(index.read_text()):
            (folder / name).unlink(missing_ok=True)
        index.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder to write to; `UserError` if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder '{folder}' cannot be made: {error.strerror}. Name a folder that does not "
            "exist yet, or one that can be written to."
        ) from error


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
