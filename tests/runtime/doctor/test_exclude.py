"""The list of hosts to leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from msc.ir.errors import UserError
from msc.runtime.doctor.exclude import exclude, read_excluded


def test_hosts_are_added_with_their_reasons(tmp_path: Path) -> None:
    file = tmp_path / "excluded.json"
    assert read_excluded(file) == {}
    exclude(file, {"node7": ["gemm cuda:3: wrong"]})
    exclude(file, {"node8": ["names: no answer"], "node7": ["pairs: changed"]})
    found = read_excluded(file)
    assert {host: entry["reasons"] for host, entry in found.items()} == {
        "node7": ["pairs: changed"],
        "node8": ["names: no answer"],
    }


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hosts": []}'])
def test_another_file_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    file = tmp_path / "excluded.json"
    file.write_text(text)
    with pytest.raises(UserError, match="is no exclude list"):
        exclude(file, {"node7": ["why"]})
    assert file.read_text() == text


def test_a_list_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        exclude(tmp_path / "missing" / "excluded.json", {"node7": ["why"]})
