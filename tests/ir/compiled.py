"""Compiled programs whose rank graphs the tests of the IR look at."""

from __future__ import annotations

import functools
from typing import Any

import torch

import msc
from tests.capture.models import GPT

MESHES = ("", "tp=2", "pp=2,dp=2", "pp=3,tp=2", "dp=2,tp=2")


@functools.cache
def compiled(mesh: str, layers: int = 4) -> msc.Program:
    """A GPT with dropout and a tied head, two micro-batches, AdamW: every kind of node there is."""
    torch.manual_seed(0)
    model = GPT(layers=layers, dropout=0.1).double()
    return msc.compile(
        model,
        batch(),
        loss_fn=lambda output: output[1],
        mesh=mesh,
        microbatches=2,
        optimizer=msc.AdamW(lr=1e-3),
    )


def batch() -> tuple[Any, ...]:
    """The global batch that the programs are compiled for."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, 32, (2, 8, 8), generator=generator)
    return ids, targets
