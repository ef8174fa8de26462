"""Training data that every machine has: the source text of Python's standard library, as bytes."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@cache
def text() -> bytes:
    """All source files, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in root.rglob("*.py")
        if not SKIPPED.intersection(file.relative_to(root).parts)
    ]
    return b"\n".join(file.read_bytes() for file in sorted(files))


class StdlibText:
    """Random windows of the text: row i of step s is the same on every rank and in every run.

    The last twentieth of the text is held out, and is what `held_out=True` gives.
    """

    def __init__(self, batch: int, sequence: int, seed: int = 0, held_out: bool = False) -> None:
        self.batch = batch
        self.sequence = sequence
        self.seed = seed
        self.held_out = held_out
        data = text()
        cut = len(data) - len(data) // 20
        part = data[cut:] if held_out else data[:cut]
        self._bytes = torch.frombuffer(bytearray(part), dtype=torch.uint8)

    def rows(self, step: int, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens and labels, each int64 [len(indices), sequence]."""
        windows = torch.stack([self._window(step * self.batch + index) for index in indices])
        windows = windows.to(torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _window(self, number: int) -> Tensor:
        last = len(self._bytes) - self.sequence - 1
        start = random.Random(f"{self.seed} {self.held_out} {number}").randint(0, last)
        return self._bytes[start : start + self.sequence + 1]

    def state_dict(self) -> dict[str, Any]:
        """Nothing changes from step to step: the step's number says all."""
        return {"seed": self.seed, "batch": self.batch, "sequence": self.sequence}
