"""What the tests of checkpoints run in every rank; started by itself through `msc.launch`.

    python job.py FOLDER NPROC CASE..

A case is `NAME:STEPS:MESH`: train the program in FOLDER/MESH to STEPS steps, with checkpoints in
FOLDER/NAME, or without any where NAME is "plain". Where MESH begins with "zero" the data is an
iterable that keeps its own position, else rows that are asked for by step. Rank 0's findings, and
the lines of each rank, go to FOLDER/NAME.MESH.pt.
`NAME:STEPS:MESH:kill=N` kills rank N, or all ranks ("all"), when step STEPS has ended; the step
before it was saved. `:writer=N` kills the process that writes rank N's saves, before step STEPS.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import msc
from msc.launch import launch, under_torchrun

EVERY = 2
VOCABULARY, SAMPLES, LENGTH = 96, 8, 16


def tokens(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Rows:
    """Batches by their step; `version` is its state."""

    def __init__(self, version: int = 1) -> None:
        self.version = version

    def rows(self, step: int, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[list(indices)] for tensor in tokens(step))

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}


class Stateful:
    """An iterable that keeps its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield tokens(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train(folder: Path, case: str) -> None:
    name, steps, mesh, *rest = case.split(":")
    rank = int(os.environ["RANK"])
    program = msc.load(folder / mesh, rank)
    options = None
    if name != "plain":
        busy: Any = "skip" if name == "skips" else "wait"
        options = msc.Checkpoint(folder / name, every=EVERY, keep=2, when_busy=busy)
    lines: list[str] = []
    run = folder / f"{name}.{mesh}.run"
    data = Stateful() if mesh.startswith("zero") else Rows()
    with msc.Trainer(program, data, log=lines.append, checkpoint=options, run=run) as trainer:
        first = trainer.step
        what, _, who = "".join(rest).partition("=")
        if what == "stopped":
            train_while_stopped(trainer, int(steps), who == str(rank))
        elif what:
            trainer.fit(int(steps) - 1 - first)
            trainer.save()
        if what == "writer" and who == str(rank):
            kill_writer(trainer)
        trainer.fit(int(steps) - trainer.step)
        if what == "kill":
            if who in ("all", str(rank)):
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.fit(2)
        told: list[list[str]] = [[] for _ in range(program.mesh.size)]
        torch.distributed.all_gather_object(told, lines)
        read = torch.zeros(2, dtype=torch.int64)
        if trainer._run.checkpoints is not None:
            report = trainer._run.checkpoints.report
            read = torch.tensor([report.bytes_read, report.bytes_received])
        torch.distributed.all_reduce(read)
        found = {
            "first": first,
            "losses": trainer.losses,
            "params": trainer.state_dict(),
            "optimizer": trainer.optimizer_state_dict(),
            "lines": told,
            "read": read.tolist(),
        }
    if rank == 0:
        torch.save(found, folder / f"{name}.{mesh}.pt")


def kill_writer(trainer: msc.Trainer) -> None:
    """Kill the writing process, and wait until that is known."""
    checkpoints = trainer._run.checkpoints
    assert checkpoints is not None
    os.kill(checkpoints.writer.pid, signal.SIGKILL)
    while checkpoints.messages.empty():
        time.sleep(0.01)


def train_while_stopped(trainer: msc.Trainer, steps: int, here: bool) -> None:
    """Train while one rank's writing process is stopped, then wait until all saves are over.

    The other's has always written before the next step that is saved, however slow it is.
    """
    checkpoints = trainer._run.checkpoints
    assert checkpoints is not None
    if here:
        os.kill(checkpoints.writer.pid, signal.SIGSTOP)
    for _ in range(steps // EVERY):
        trainer.fit(EVERY)
        checkpoints.settle()
        while not here and checkpoints.writer.written != trainer.step:
            time.sleep(0.01)
    if here:
        os.kill(checkpoints.writer.pid, signal.SIGCONT)
    checkpoints.flush()
    trainer._run.show_messages()


def main() -> int:
    if not under_torchrun():
        return launch(sys.argv, int(sys.argv[2]))
    torch.set_num_threads(1)
    for case in sys.argv[3:]:
        train(Path(sys.argv[1]), case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
