"""What the tests of the trainer run in every rank; started by itself through `msc.launch`.

    python training_job.py FOLDER NPROC CASE..

Each case is a function below, or the name of a folder in FOLDER with a saved program to train.
Rank 0's findings go to FOLDER/CASE.pt, and every rank's error messages to FOLDER/CASE.RANK.txt.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import msc
from msc.launch import launch, under_torchrun
from msc.program import Program
from tests import models

ADAMW = msc.AdamW(lr=1e-2, weight_decay=0.1)
STEPS = 3


def batches(name: str) -> list[Any]:
    """The global batches of a model's run."""
    return [models.batch(name, seed) for seed in range(STEPS)]


@functools.cache
def compile_small(lr: float = 1e-2, seed: int = 0, mesh: str = "pp=2", zero: int = 0) -> Program:
    """A program for two ranks of a model with two layers."""
    torch.manual_seed(seed)
    model = models.GPT(width=16, heads=2, layers=2)
    adamw = msc.AdamW(lr=lr)
    return msc.compile(model, models.tokens(), mesh=mesh, zero=zero, optimizer=adamw)


def compile_zero() -> Program:
    """A program whose steps gather parameters while their batch is loaded."""
    return compile_small(mesh="dp=2", zero=1)


def train(folder: Path, case: str) -> dict[str, Any]:
    """Train a saved program; every rank reads its own part of it."""
    program = msc.load(folder / case, int(os.environ["RANK"]))
    data = batches(case.partition(".")[0])
    with msc.Trainer(program, data, log=False) as trainer:
        trainer.fit(1)
        gradients = trainer.optimizer_state_dict()
        trainer.fit(STEPS - 1)
        evaluation = trainer.evaluate(data)
        return {
            "losses": trainer.losses,
            "grad_norms": trainer.grad_norms,
            "learning_rates": trainer.learning_rates,
            "first_moment": gradients["first_moment"],
            "params": trainer.state_dict(),
            "evaluation": evaluation,
            "evaluated_again": trainer.evaluate(data),
        }


def other_program(folder: Path, rank: int) -> None:
    """Rank 1 has compiled with another learning rate."""
    msc.Trainer(compile_small(lr=1e-2 if rank == 0 else 2e-2), [], log=False)


def other_values(folder: Path, rank: int) -> None:
    """Rank 1 has other initial parameters."""
    msc.Trainer(compile_small(seed=rank), [], log=False)


def other_world(folder: Path, rank: int) -> None:
    """A program for four ranks."""
    program = msc.compile(models.GPT(), models.tokens(), mesh="pp=2,tp=2", optimizer=ADAMW)
    msc.Trainer(program, [], log=False)


def short_data(folder: Path, rank: int) -> None:
    """Rank 1's data ends before rank 0's."""
    data = [models.tokens()] * (2 - rank)
    with msc.Trainer(compile_small(), data, log=False, timeout_s=5) as trainer:
        trainer.fit(2)


def data_ends_in_step(folder: Path, rank: int) -> None:
    """The data of both ranks ends while a step is under way; what was trained stays."""
    data = [models.tokens()] * 2
    with msc.Trainer(compile_zero(), data, log=False, timeout_s=5) as trainer:
        try:
            trainer.fit(3)
        finally:
            values = trainer.state_dict()
            if rank == 0:
                torch.save({"values": values, "losses": trainer.losses}, folder / "ended.pt")


def data_fails_in_step(folder: Path, rank: int) -> None:
    """Rank 1's data cannot be read while a step is under way."""

    def data() -> Iterator[Any]:
        yield models.tokens()
        if rank == 1:
            raise OSError("the disk is gone")
        yield models.tokens()

    with msc.Trainer(compile_zero(), data(), log=False, timeout_s=5) as trainer:
        trainer.fit(2)


def silent(folder: Path, rank: int) -> None:
    """Rank 1 hangs in its second step until rank 0 has given up."""

    def data() -> Iterator[Any]:
        yield models.tokens()
        while rank == 1 and not (folder / "silent.0.txt").exists():
            time.sleep(0.1)
        yield models.tokens()

    with msc.Trainer(compile_small(), data(), log=False, timeout_s=5) as trainer:
        trainer.fit(2)


def flipped_bit(folder: Path, rank: int) -> None:
    """A bit of one parameter on rank 1 changes between two steps."""
    data = [models.tokens()] * 4
    guard = msc.Guard(every=1)
    with msc.Trainer(compile_small(mesh="dp=2"), data, log=False, timeout_s=30, guard=guard) as run:
        run.fit(2)
        if rank == 1:
            next(iter(run._run.state.parameters.values())).view(-1).view(torch.int32)[0] ^= 1
        run.fit(1)


def rewinds(folder: Path, rank: int) -> None:
    """The same, and the run goes back to where the copies agreed."""
    data = [models.tokens(seed) for seed in range(5)]
    guard = msc.Guard(every=2, policy="rewind")
    found = []
    for disturbed in (False, True):
        with msc.Trainer(compile_small(mesh="dp=2"), data, log=False, guard=guard) as run:
            run.fit(3)
            if disturbed and rank == 1:
                next(iter(run._run.state.parameters.values())).view(-1).view(torch.int32)[0] ^= (
                    1 << 20
                )
            run.fit(2)
            found.append({**run.state_dict(), "losses": torch.tensor(run.losses)})
            events = run.events
    same = all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    raise msc.MSCError(f"equal: {same}; {events[0]}")


FAILURES: dict[str, Callable[[Path, int], None]] = {
    function.__name__: function
    for function in (
        other_program,
        other_values,
        other_world,
        short_data,
        silent,
        data_ends_in_step,
        data_fails_in_step,
        flipped_bit,
        rewinds,
    )
}


def run(folder: Path, cases: list[str]) -> None:
    """Run the cases as one rank."""
    rank = int(os.environ["RANK"])
    if not FAILURES.keys().isdisjoint(cases):
        compile_small(), compile_zero()  # so that no rank is late where the time to wait is short
    for case in cases:
        if case not in FAILURES:
            found = train(folder, case)
            if rank == 0:
                torch.save(found, folder / f"{case}.pt")
            continue
        try:
            FAILURES[case](folder, rank)
        except (msc.MSCError, OSError) as error:
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
            (folder / f"{case}.{rank}.txt").write_text(text)
        else:
            raise AssertionError(f"{case} did not fail on rank {rank}")


def main() -> int:
    if not under_torchrun():
        return launch(sys.argv, int(sys.argv[2]))
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[3:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
