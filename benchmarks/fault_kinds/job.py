"""What a run of the fault campaign has in every rank: `python job.py SETTINGS`, a file of JSON.

It trains a saved program with checkpoints to a step, and makes the faults of its rank when it asks
for the data of their steps. Rank 0 leaves what it finds in FOLDER/found.pt; all ranks leave what
they are told in FOLDER/lines.jsonl, and each fault in FOLDER/injected.jsonl.
"""

from __future__ import annotations

import functools
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import msc  # noqa: E402
from benchmarks.fault_kinds import inside, machine  # noqa: E402
from benchmarks.fault_kinds.tokens import VOCABULARY, WORDS, Rows, batch  # noqa: E402

_READER = """
import random, struct, sys
while True:
    head = sys.stdin.buffer.read(16)
    if len(head) < 16:
        break
    step, count = struct.unpack("<qq", head)
    chance = random.Random(step)
    words = [chance.randrange(%d) for _ in range(count)]
    sys.stdout.buffer.write(struct.pack(f"<{count}q", *words))
    sys.stdout.buffer.flush()
"""


class Reader:
    """A process that reads a rank's data."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _READER % VOCABULARY]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch of a step. Raises `EOFError` if the process is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(struct.pack("<qq", step, WORDS))
            self.process.stdin.flush()
            raw = self.process.stdout.read(8 * WORDS)
        except BrokenPipeError:
            raw = b""
        if len(raw) < 8 * WORDS:
            raise EOFError(f"the reader of the data has died (code {self.process.poll()})")
        return batch(struct.unpack(f"<{WORDS}q", raw))


class Data(Rows):
    """Rows by their step; before they are given, the faults of the step are made."""

    def __init__(self, faults: Faults, reader: bool, pause_s: float) -> None:
        self.faults = faults
        self.reader = Reader() if reader else None
        self._pause_s = pause_s

    def rows(self, step: int, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Rows of a step."""
        self.faults.at(step)
        time.sleep(self._pause_s)
        if self.reader is None:
            return super().rows(step, indices)
        return tuple(tensor[list(indices)] for tensor in self.reader.read(step))


class Faults:
    """The faults of this rank, each made once; those of a program that is wrong, every time.

    settings: of the run. trainer, data: of this process, once there are any.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.folder: Path = Path(settings["folder"])
        self.rank = int(os.environ["RANK"])
        self.chance = random.Random()
        self.trainer: Any = None
        self.data: Any = None
        self._later: list[tuple[int, Callable[[], object]]] = []
        self._mine = [each for each in settings["faults"] if self.rank in each["ranks"]]

    def later(self, step: int, action: Callable[[], object]) -> None:
        """Do something when the data of `step`, or of a later one, is asked for."""
        self._later.append((step, action))

    def at(self, step: int) -> None:
        """The data of a step is asked for."""
        due = [each for each in self._later if each[0] <= step]
        self._later = [each for each in self._later if each[0] > step]
        for _, action in due:
            action()
        for fault in self._mine:
            if fault["step"] == step and self._begin(fault):
                ACTIONS[fault["kind"]](self, step)

    def at_start(self) -> None:
        """The process begins: faults that are made before it has a Trainer."""
        for fault in self._mine:
            if fault["step"] < 0:
                where = fault["kind"].removeprefix("kill-")
                inside.kill_at(where, functools.partial(self._begin_if_due, fault))

    def _begin_if_due(self, fault: dict[str, Any]) -> bool:
        return self._is_due(fault) and self._begin(fault)

    def _is_due(self, fault: dict[str, Any]) -> bool:
        """Whether the fault before it, which this one is chained to, was made."""
        before = fault["after"]
        return before is None or any(self.folder.glob(f"done/{before}.*"))

    def _begin(self, fault: dict[str, Any]) -> bool:
        """Note a fault that is about to be made; whether it was not made before."""
        name = f"{fault['number']}.{self.rank}"
        done = self.folder / "done" / name
        try:
            done.touch(exist_ok=False)
        except FileExistsError:
            return bool(fault["always"])
        entry = {"kind": fault["kind"], "number": fault["number"], "rank": self.rank}
        self.note("injected.jsonl", {**entry, "step": fault["step"] + 1})
        end = time.monotonic() + 10.0
        while time.monotonic() < end:  # all ranks of a fault at once
            if len(list(self.folder.glob(f"done/{fault['number']}.*"))) == len(fault["ranks"]):
                break
            time.sleep(0.001)
        return True

    def note(self, file: str, facts: dict[str, Any]) -> None:
        """Append a line with the time."""
        line = json.dumps({"time": time.time(), **facts}) + "\n"
        handle = os.open(self.folder / file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)

    def say(self, line: str) -> None:
        """A line that the Trainer tells, or a fault."""
        self.note("lines.jsonl", {"rank": self.rank, "line": line})


ACTIONS: dict[str, Callable[[Faults, int], None]] = {**inside.ACTIONS, **machine.ACTIONS}


def main() -> None:
    """One rank's run."""
    torch.set_num_threads(1)
    settings = json.loads(Path(sys.argv[1]).read_text())
    faults = Faults(settings)
    (faults.folder / f"pid.{faults.rank}").write_text(str(os.getpid()))
    faults.at_start()
    program = msc.load(settings["program"], faults.rank)
    every = settings["every"]
    saves = msc.Checkpoint(settings["saves"], every=every, keep=3)
    data = Data(faults, settings["reader"], settings["pause_s"])
    faults.data = data
    guard = msc.Guard(every=every, policy="replay") if settings["guard"] else None
    with msc.Trainer(program, data, checkpoint=saves, log=faults.say, guard=guard) as trainer:
        faults.trainer = trainer
        inside.compute_longer(trainer, settings["device_s"])
        trainer.fit(max(0, settings["steps"] - trainer.step))
        found = {
            "losses": trainer.losses,
            "parameters": trainer.state_dict(),
            "optimizer": trainer.optimizer_state_dict(),
        }
    if faults.rank == 0:
        torch.save(found, faults.folder / "found.pt")


main()
