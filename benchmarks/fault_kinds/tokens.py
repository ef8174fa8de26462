"""The data of the fault campaign's runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VOCABULARY, SAMPLES, LENGTH = 96, 8, 16
WORDS = SAMPLES * (LENGTH + 1)
"""Of the global batch of a step."""


def words(step: int) -> list[int]:
    """The words of a step; `job.py`'s reader draws the same."""
    chance = random.Random(step)
    return [chance.randrange(VOCABULARY) for _ in range(WORDS)]


def batch(found: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [SAMPLES, LENGTH] each."""
    ids = torch.tensor(found).view(SAMPLES, LENGTH + 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Rows:
    """Rows by their step."""

    def rows(self, step: int, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Rows of the global batch of a step."""
        return tuple(tensor[list(indices)] for tensor in batch(words(step)))

    def state_dict(self) -> dict[str, Any]:
        """It has none."""
        return {}
