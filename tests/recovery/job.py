"""What the tests of recovery run in every rank: python job.py FOLDER MESH STEPS RESULT FAULTS

Trains the program in FOLDER/MESH to STEPS, or "6+12" in two calls of fit, with checkpoints in
FOLDER/RESULT.saves; rank 0's findings go to FOLDER/RESULT. FAULTS are `RANK@STEP@WHAT` with commas
between them, each done once, when the rank asks for the data of the step: WHAT is a signal,
"raise", "spin" (computes for ever), "wait" (until a standby is there), "until FILE" (until it is in
FOLDER), "copied N" (until step N is, on another node), "node SIGNAL", which sends a signal to the
rank's agent and all of its ranks, or "always", which raises every time. At STEP "fit" it is done
before the first step, and at "start" before the rank meets the others, if a fault was done before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import msc
from msc.runtime.recovery.events import read_events
from msc.runtime.recovery.link import current
from tests.checkpoint.job import Rows

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
FAULTS = [fault for fault in sys.argv[5].split(",") if fault]


class Data(Rows):
    """The rows of the tests of checkpoints, and the faults."""

    trainer: Any = None

    def rows(self, step: int, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        do_faults(str(step), self.trainer)
        return super().rows(step, indices)


def do_faults(step: str, trainer: Any) -> None:
    for fault in FAULTS:
        rank, at, what = fault.split("@")
        if int(rank) != RANK or at != step:
            continue
        if what == "always":
            raise ValueError("on purpose")
        done = FOLDER / f"done.{fault}"
        if done.exists() or (step == "start" and not list(FOLDER.glob("done.*"))):
            continue
        done.touch()
        if what == "raise":
            raise ValueError("on purpose")
        if what == "spin":
            trainer._run.executor.run = spin
        elif what == "wait":
            wait_for(event="standby is warm")
        elif what.startswith("copied "):
            link, last = current(), int(what.removeprefix("copied "))
            assert link is not None
            while last not in [
                e["step"] for e in read_events(link.folder) if e["event"] == "copied"
            ]:
                time.sleep(0.1)
        elif what.startswith("until "):
            while not (FOLDER / what.removeprefix("until ")).exists():
                time.sleep(0.05)
        elif what.startswith("node "):
            agent = os.getppid()
            ranks = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
            for pid in [
                agent,
                *(int(pid) for pid in ranks if int(pid) != os.getpid()),
                os.getpid(),
            ]:
                os.kill(pid, getattr(signal, what.removeprefix("node ")))
            time.sleep(0.1)
        else:
            os.kill(os.getpid(), getattr(signal, what))
            time.sleep(0.1)


def wait_for(**facts: Any) -> None:
    """Wait until the run has had such an event."""
    link = current()
    assert link is not None
    while not any(facts.items() <= event.items() for event in read_events(link.folder)):
        time.sleep(0.05)


def spin(inputs: Sequence[Any]) -> None:
    while True:
        sum(range(1000))


def main() -> None:
    torch.set_num_threads(1)
    _, _, mesh, steps, result, _ = sys.argv
    do_faults("start", None)
    program = msc.load(FOLDER / mesh, RANK)
    saves = msc.Checkpoint(FOLDER / f"{result}.saves", every=2, keep=2)
    data = Data()
    guard = msc.Guard(every=4)  # whatever happens, copies of the state stay equal
    with msc.Trainer(program, data, log=False, checkpoint=saves, guard=guard) as trainer:
        data.trainer = trainer
        do_faults("fit", trainer)
        for end in map(int, steps.split("+")):
            trainer.fit(max(0, end - trainer.step))
        found = {
            "params": trainer.state_dict(),
            "optimizer": trainer.optimizer_state_dict(),
            "losses": trainer.losses,
            "norms": trainer.grad_norms,
        }
    if RANK == 0:
        torch.save(found, FOLDER / result)


main()
