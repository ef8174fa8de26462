"""Faults of saved files: each must be found, and the newest intact checkpoint be taken.

The files are those that an undisturbed run has left. What takes one is a Trainer of one rank, which
reads the checkpoint of any layout.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import msc
from msc.checkpoint.run import History
from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.manifest import COMMIT, DamagedError, data_name, part_name
from msc.runtime.checkpoint.storage import LocalStorage

ROOT = Path(__file__).resolve().parents[2]
_KILLS = ROOT / "tests" / "runtime" / "checkpoint" / "kill_points.py"
KILLS = 200


def flip(file: Path, chance: random.Random) -> None:
    """Flip a random bit of a file."""
    place, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
    with file.open("r+b") as out:
        out.seek(place)
        (byte,) = out.read(1)
        out.seek(place)
        out.write(bytes([byte ^ 1 << bit]))


class Loaded:
    """Loads the checkpoints in a folder, as a run that starts does.

    program: of one rank; data: what the run had.
    """

    def __init__(self, program: msc.Program, data: msc.Data, folder: Path) -> None:
        self.messages: list[str] = []
        saves = msc.Checkpoint(folder)
        self._trainer = msc.Trainer(program, data, checkpoint=saves, log=self.messages.append)

    def step(self) -> int:
        """The step of the checkpoint that is taken now."""
        checkpoints = self._trainer._run.checkpoints
        assert checkpoints is not None
        found: History | None = checkpoints.resume(self._trainer._run.state)
        self._trainer._run.show_messages()
        return 0 if found is None else self._trainer.step

    def state(self) -> dict[str, torch.Tensor]:
        """The parameters, whole."""
        return self._trainer.state_dict()

    def close(self) -> None:
        """Leave the job."""
        self._trainer.close()


class SavedFaults:
    """Makes each fault in a copy of the two newest checkpoints of a run.

    saves: the run's folder; folder: for the copy; program, data: see `Loaded`.
    """

    def __init__(self, saves: Path, folder: Path, program: msc.Program, data: msc.Data) -> None:
        self._saves = saves
        self.folder = folder
        complete = [
            each.folder for each in catalog.checkpoints(LocalStorage(saves)) if each.complete
        ]
        self.newest, self.older = complete[:2]
        self.restore()
        self.loaded = Loaded(program, data, folder)
        self.steps = [int(name.split("-")[1]) for name in (self.newest, self.older)]
        self.states: list[dict[str, torch.Tensor]] = []
        for hidden in (None, self.newest):
            self.hide(hidden)
            assert self.loaded.step() == self.steps[len(self.states)]
            self.states.append({n: v.clone() for n, v in self.loaded.state().items()})
            self.restore()

    def close(self) -> None:
        """Remove the copies, and leave the job."""
        self.loaded.close()
        shutil.rmtree(self.folder)

    def hide(self, name: str | None) -> None:
        """Take a checkpoint away."""
        if name is not None:
            shutil.rmtree(self.folder / name)

    def restore(self) -> None:
        """Both checkpoints as they were."""
        for name in (self.newest, self.older):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            shutil.copytree(self._saves / name, self.folder / name)

    def find(self) -> str:
        """What the newest is told to have; "" if it is taken for intact."""
        try:
            catalog.verify(LocalStorage(self.folder), self.newest)
        except DamagedError as error:
            return str(error)
        return ""

    def takes_older(self) -> bool:
        """Whether a run that starts takes the older one, bit for bit."""
        if self.loaded.step() != self.steps[1]:
            return False
        state = self.loaded.state()
        return all(torch.equal(value, state[name]) for name, value in self.states[1].items())

    def files(self) -> list[Path]:
        """All files of the newest."""
        return sorted(path for path in (self.folder / self.newest).iterdir())

    def make(self, kind: str, chance: random.Random) -> None:
        """Make a fault in the newest."""
        _ACTIONS[kind](self.folder / self.newest, self.folder / self.older, chance)


def _cut(newest: Path, older: Path, chance: random.Random) -> None:
    file = newest / data_name(0)
    os.truncate(file, file.stat().st_size - 1)


def _swap(newest: Path, older: Path, chance: random.Random) -> None:
    one, other = newest / data_name(0), newest / data_name(1)
    between = newest / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)


def _other_step(newest: Path, older: Path, chance: random.Random) -> None:
    for name in (data_name(0), part_name(0)):
        shutil.copy(older / name, newest / name)


def _other_attempt(newest: Path, older: Path, chance: random.Random) -> None:
    """As if another save of the same step had left its part here."""
    record = newest / part_name(0)
    text = record.read_text()
    attempt = newest.name.rpartition("-")[2]
    other = "".join("%x" % (15 - int(digit, 16)) for digit in attempt)
    record.write_text(text.replace(attempt, other))


_ACTIONS: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "flipped-data": lambda new, old, chance: flip(new / data_name(chance.randrange(2)), chance),
    "flipped-record": lambda new, old, chance: flip(new / part_name(chance.randrange(2)), chance),
    "flipped-commit": lambda new, old, chance: flip(new / COMMIT, chance),
    "cut-file": _cut,
    "missing-file": lambda new, old, chance: (new / data_name(0)).unlink(),
    "swapped-files": _swap,
    "other-step": _other_step,
    "other-attempt": _other_attempt,
    "no-commit": lambda new, old, chance: (new / COMMIT).unlink(),
}


def flips(saved: SavedFaults, count: int, chance: random.Random) -> dict[str, float]:
    """Flip bits, each in the whole folder as it was: how many were found, and not taken."""
    started = time.monotonic()
    files = saved.files()
    found = refused = 0
    for number in range(count):
        file = files[number % len(files)]
        raw = file.read_bytes()
        flip(file, chance)
        found += bool(saved.find())
        refused += saved.takes_older()
        file.write_bytes(raw)
    return {
        "flips": count,
        "files": len(files),
        "found": found,
        "refused": refused,
        "seconds": time.monotonic() - started,
    }


def kill_writers(count: int) -> tuple[int, int]:
    """Kill writers at random bytes: how often the step before was found, and the new one.

    Raises `SystemExit` if what was found was not what was saved.
    """
    with tempfile.TemporaryDirectory(prefix="msc-faults-") as folder:
        done = subprocess.run(
            [sys.executable, str(_KILLS), folder, str(count)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    old, new = map(int, done.stdout.split())
    return old, new
