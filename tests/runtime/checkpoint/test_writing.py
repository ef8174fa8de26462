"""Writing, committing, checking and removing: nothing wrong is ever taken for a checkpoint."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from msc.runtime.checkpoint.catalog import Found, checkpoints, prune, read_commit, verify
from msc.runtime.checkpoint.committing import Committer
from msc.runtime.checkpoint.manifest import DamagedError, folder_step
from msc.runtime.checkpoint.storage import FsspecStorage, LocalStorage, Storage, open_storage
from msc.runtime.checkpoint.writer import PartWriter
from tests.runtime.checkpoint.writes import SIZE, WORLD, image, nothing, save

ROOT = Path(__file__).parents[3]
LONG = "MSC_TEST_LONG" in os.environ
KILLS = 200 if LONG else 30
FLIPS = 1000 if LONG else 300


@pytest.fixture(params=["folder", "fsspec"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return LocalStorage(tmp_path / "saves")
    return FsspecStorage(f"memory://{tmp_path}")


def complete(storage: Storage) -> list[int]:
    return [each.step for each in checkpoints(storage) if each.complete]


def damage(storage: Storage, folder: str) -> str:
    with pytest.raises(DamagedError) as error:
        verify(storage, folder)
    return str(error.value)


def test_a_saved_step_is_complete_and_intact(storage: Storage) -> None:
    folder = save(storage, 7)
    assert checkpoints(storage) == [Found(folder, 7, True)]
    assert verify(storage, folder) == WORLD * SIZE
    assert read_commit(storage, folder).state == {"seed": 0}
    assert storage.read(f"{folder}/__1_0.distcp") == image(7, 1)
    assert storage.read(f"{folder}/__1_0.distcp", 10, 5) == image(7, 1)[10:15]


def test_urls() -> None:
    assert isinstance(open_storage("a/b"), LocalStorage)
    assert isinstance(open_storage("file:///a/b"), LocalStorage)
    assert isinstance(open_storage("memory://a"), FsspecStorage)
    assert folder_step("step-00000012-ab") == 12
    assert folder_step("notes") is folder_step("step-x-ab") is None


def test_a_step_without_a_part_is_incomplete(storage: Storage) -> None:
    save(storage, 1)
    folder = save(storage, 2, order=[0])
    assert complete(storage) == [1]
    assert "commit.json cannot be read" in damage(storage, folder)


def test_a_step_whose_parts_do_not_come_is_given_up_by_name(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    storage = LocalStorage(tmp_path)
    committer = Committer(
        storage, WORLD, "aa", {}, None, (), lambda event, **f: told.append({"e": event} | f), -1.0
    )
    PartWriter(storage, 0, "aa", (), SIZE).write(3, memoryview(image(3, 0)))
    committer.expect(3, {}, {})
    assert not committer.poll()
    error = "part-00001.json did not come"
    assert told == [{"e": "abandoned", "step": 3, "attempt": "aa", "error": error}]


def test_a_kill_at_any_byte_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_points.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(KILLS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    old, new = map(int, done.stdout.split())
    assert old + new == KILLS
    assert min(old, new) > KILLS // 20  # kills before and after the commit


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    folder = save(storage, 1)
    files = sorted(path for path in (tmp_path / folder).iterdir())
    chance = random.Random(0)
    for number in range(FLIPS):
        file = files[number % len(files)]
        raw = file.read_bytes()
        changed = bytearray(raw)
        changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        assert file.name in damage(storage, folder) or file.name.startswith("part-")
        file.write_bytes(raw)
    verify(storage, folder)


def test_cut_missing_swapped_and_mixed_files_are_named(storage: Storage) -> None:
    one, two = save(storage, 1), save(storage, 2)
    raw = storage.read(f"{two}/__1_0.distcp")
    cases = {
        "cut": raw[:-1],
        "of another step": storage.read(f"{one}/__1_0.distcp"),
        "of another rank": storage.read(f"{two}/__0_0.distcp"),
        "with a page of zeros": raw[:65536] + bytes(4096) + raw[65536 + 4096 :],
        "with something behind it": raw + b"x",
    }
    for case, data in cases.items():
        storage.put(f"{two}/__1_0.distcp", data)
        assert damage(storage, two).startswith("__1_0.distcp"), case
    storage.remove(f"{two}/__1_0.distcp")
    assert "__1_0.distcp cannot be read" in damage(storage, two)
    storage.put(f"{two}/__1_0.distcp", raw)
    verify(storage, two)
    record = storage.read(f"{two}/part-00001.json")
    storage.put(f"{two}/part-00001.json", storage.read(f"{one}/part-00001.json"))
    assert damage(storage, two) == (
        "part-00001.json is not what was committed: damaged, or of another save"
    )
    storage.put(f"{two}/part-00001.json", record)
    storage.put(f"{two}/commit.json", storage.read(f"{one}/commit.json"))
    assert damage(storage, two) == "commit.json is of step 1, attempt aa"


def test_errors_of_other_file_systems_are_os_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FsspecStorage("memory://errors")

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("403")

    monkeypatch.setattr(storage._fs, "cat_file", fail)
    with pytest.raises(OSError, match="part: RuntimeError: 403"):
        storage.read("part")


class Full(LocalStorage):
    """A disk that is full in the middle of a data file."""

    def write(self, name: str, blocks: Iterable[memoryview]) -> None:
        for block in blocks:
            super().write(name, [block[: SIZE // 2]])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    save(LocalStorage(tmp_path), 1)
    with pytest.raises(OSError, match="No space left on device"):
        save(Full(tmp_path), 2)
    assert complete(LocalStorage(tmp_path)) == [1]
    assert list((tmp_path / "step-00000002-aa").iterdir()) == []


def test_the_newest_stay(storage: Storage) -> None:
    for step in range(1, 5):
        save(storage, step, keep=2)
    assert complete(storage) == [4, 3]
    assert len(storage.names()) == 2


def test_the_last_intact_one_is_not_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    folders = [save(storage, step) for step in (1, 2, 3)]
    for folder in folders[1:]:
        (tmp_path / folder / "__0_0.distcp").write_bytes(b"rubbish")
    told: list[str] = []
    verified = {folders[0]}
    assert prune(storage, 1, verified, tell=told.append) == []
    assert complete(storage) == [3, 2, 1]
    assert f"{folders[2]} is damaged: __0_0.distcp has 7 bytes" in told[0]
    folders.append(save(storage, 4))
    assert prune(storage, 1, verified) == [folders[2], folders[1], folders[0]]
    assert verified == {folders[3]}


def test_incomplete_ones_go_when_a_later_step_is_complete(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    older = save(storage, 1, order=[1])
    save(storage, 2)
    newer = save(storage, 3, order=[0])
    waiting = save(storage, 1, attempt="bb", order=[0])
    assert prune(storage, 5, set(), pending=[waiting]) == [older]
    assert {each.folder for each in checkpoints(storage) if not each.complete} == {newer, waiting}


def test_a_second_save_of_a_step_leaves_the_first_alone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    first = save(storage, 1)
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / first).iterdir()}
    save(storage, 1, attempt="bb", order=[1])
    assert {f.name: f.stat().st_mtime_ns for f in (tmp_path / first).iterdir()} == before
    second = save(storage, 1, attempt="bb", keep=1)
    assert [each.folder for each in checkpoints(storage)] == [second]


def test_a_commit_that_fails_is_tried_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    committer = Committer(storage, 1, "aa", {}, None, (), nothing, 60.0)
    PartWriter(storage, 0, "aa", (), SIZE).write(1, memoryview(image(1, 0)))
    committer.expect(1, {}, {})
    folder = tmp_path / "step-00000001-aa"
    (folder / "commit.json").mkdir()  # in the way
    with pytest.raises(OSError, match="directory"):
        committer.poll()
    shutil.rmtree(folder / "commit.json")
    assert not committer.poll()
    assert complete(storage) == [1]


def test_a_step_of_ranks_that_are_gone_is_given_up_when_nothing_of_it_grows(tmp_path: Path) -> None:
    told: list[str] = []
    storage = LocalStorage(tmp_path)
    committer = Committer(
        storage, WORLD, "aa", {}, None, (), lambda event, **f: told.append(event), 600.0
    )
    PartWriter(storage, 0, "aa", (), SIZE).write(3, memoryview(image(3, 0)))
    committer.expect(3, {}, {})
    assert committer.poll()
    committer.hurry(-1.0)
    assert not committer.poll()
    assert told == ["abandoned"]


def test_a_step_that_a_rank_does_not_save_is_given_up_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    storage = LocalStorage(tmp_path)
    committer = Committer(
        storage, WORLD, "aa", {}, None, (), lambda event, **f: told.append(f"{event}: {f}"), 600.0
    )
    for step in (3, 4):
        PartWriter(storage, 0, "aa", (), SIZE).write(step, memoryview(image(step, 0)))
        committer.expect(step, {}, {})
    storage.put("step-00000003-aa/absent-00001", b"")
    assert committer.poll()
    (line,) = told
    assert line.startswith("abandoned: {'step': 3")
    assert "rank 1 did not save it" in line
