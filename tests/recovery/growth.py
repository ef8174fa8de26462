"""A run whose slot 3 is lost, and comes back.

It trains to STEPS with as many dp ranks as there are, and checkpoints in FOLDER/saves; rank 0's
findings go to FOLDER/found. In step BREAKS slot 3 breaks: the process there is killed, and others
that start there end at once. From step HEALS on, while fewer ranks train, it is sound again, and
they wait until that is known.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.program import Program
from msc.runtime.recovery.link import current
from tests.checkpoint.job import VOCABULARY, Rows, tokens
from tests.recovery.growth_job import BROKEN

STEPS, BREAKS, HEALS = 16, 5, 8
OPTIMIZER = msc.AdamW(lr=1e-2, weight_decay=0.1, max_norm=1.0, eps=1e-4)


class Model(nn.Module):
    """Small, for many processes compile it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.drop(self.embed(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(mesh: str) -> Program:
    torch.manual_seed(0)
    options: dict[str, Any] = {"optimizer": OPTIMIZER, "precision": "float64", "zero": 1}
    return msc.compile(Model(), tokens(), mesh=mesh, **options)


class Data(Rows):
    """The rows of the tests of checkpoints, and what happens to slot 3; notes who asks for them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def rows(self, step: int, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        ranks = int(os.environ["WORLD_SIZE"])
        if step == BREAKS and os.environ["LOCAL_RANK"] == "3":
            (self.folder / BROKEN).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= HEALS and ranks == 2 and os.environ["RANK"] == "0":
            (self.folder / BROKEN).unlink(missing_ok=True)
            wait_for("place is back")
        if os.environ["RANK"] == "0":
            with (self.folder / "ranks").open("a") as file:
                file.write(f"{step} {ranks} {len(indices)}\n")
        return super().rows(step, indices)


def wait_for(event: str) -> None:
    """Until the run has it; not longer in one step than data may take."""
    link = current()
    assert link is not None
    end = time.monotonic() + 45
    while event not in (link.folder / "events.jsonl").read_text() and time.monotonic() < end:
        time.sleep(0.05)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    saves = msc.Checkpoint(folder / "saves", every=2, keep=2)
    guard = msc.Guard(every=1)
    with msc.Trainer(
        build("dp=*"), Data(folder), log=False, checkpoint=saves, guard=guard
    ) as trainer:
        trainer.fit(max(0, STEPS - trainer.step))
        found = {
            "losses": torch.tensor(trainer.losses),
            "norms": torch.tensor(trainer.grad_norms),
            **trainer.state_dict(),
        }
    if trainer.rank == 0:
        torch.save(found, folder / "found")
