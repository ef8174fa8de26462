"""Small runs of one rank that are saved, and what is compared of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import msc
from msc.program import Program
from tests import models
from tests.checkpoint.job import Rows, tokens

ADAMW = msc.AdamW(lr=1e-2, weight_decay=0.1, max_norm=1.0)


@functools.cache
def program(mesh: str = "", optimizer: msc.AdamW | msc.SGD = ADAMW, **options: Any) -> Program:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=2, dropout=0.1)
    return msc.compile(model, tokens(), mesh=mesh, optimizer=optimizer, **options)


def trainer(folder: Path | None, **options: Any) -> msc.Trainer:
    settings = {"every": 1, "keep": 3, "when_busy": "wait"} | options.pop("settings", {})
    checkpoint = None if folder is None else msc.Checkpoint(folder, **settings)
    chosen: dict[str, Any] = {"program": program(), "data": Rows(), "log": False} | options
    return msc.Trainer(checkpoint=checkpoint, **chosen)


def findings(run: msc.Trainer) -> dict[str, Any]:
    return {
        "params": run.state_dict(),
        "optimizer": run.optimizer_state_dict(),
        "losses": run.losses,
        "norms": run.grad_norms,
        "rates": run.learning_rates,
    }


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
