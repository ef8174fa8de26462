"""Small checkpoints for tests, written as writing processes write them; no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msc.runtime.checkpoint.committing import Committer
from msc.runtime.checkpoint.storage import Storage
from msc.runtime.checkpoint.writer import PartWriter

WORLD = 2
SIZE = 200_000  # of a part's data file: four chunks


def image(step: int, rank: int) -> bytes:
    """The data file of a rank at a step."""
    return random.Random(f"{step} {rank}").randbytes(SIZE)


def nothing(event: str, **facts: object) -> None:
    """Reports to nobody."""


def save(
    storage: Storage,
    step: int,
    attempt: str = "aa",
    order: Sequence[int] = range(WORLD),
    keep: int | None = None,
) -> str:
    """Write and commit a step of `WORLD` ranks, which write in the given order; its folder."""
    committer = Committer(storage, WORLD, attempt, {"plan.json": b"{}"}, keep, (), nothing, 60.0)
    for rank in order:
        PartWriter(storage, rank, attempt, (), SIZE).write(step, memoryview(image(step, rank)))
        if rank == 0:
            committer.expect(step, {"seed": 0}, {"history.json": "{}"})
        committer.poll()
    committer.poll()
    return f"step-{step:08d}-{attempt}"
