"""Where the chunks of a model lie, and the pieces of work that a schedule puts in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "weight"]


@dataclass(frozen=True)
class Step:
    """One piece of work of one micro-batch on one chunk.

    kind: "forward"; "backward": all gradients, or the input gradients alone where the backward is
        split; "weight": the weight gradients of a split backward.
    """

    kind: Kind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}@{self.chunk}"


@dataclass(frozen=True)
class Stages:
    """The chunks of a pipeline on its stages, the coordinates of pp.

        loop, 2 virtual stages      chunks 0 4 | 1 5 | 2 6 | 3 7
        v                           chunks 0 7 | 1 6 | 2 5 | 3 4

    In a loop the last stage passes on to the first. In a V it keeps its value, and the first stage
    has both the first and the last chunk.
    """

    count: int
    virtual: int = 1
    shape: Literal["loop", "v"] = "loop"

    @property
    def num_chunks(self) -> int:
        """The number of chunks of all stages."""
        return self.count * self.virtual

    def of(self, chunk: int) -> int:
        """The stage of a chunk."""
        turn, place = divmod(chunk, self.count)
        return self.count - 1 - place if self.shape == "v" and turn % 2 else place

    def chunks(self, stage: int) -> list[int]:
        """The chunks of a stage, in the order of the forward."""
        return [chunk for chunk in range(self.num_chunks) if self.of(chunk) == stage]

    def beside(self, chunk: int) -> list[int]:
        """The stages of the chunks before and after a chunk."""
        return [self.of(c) for c in (chunk - 1, chunk + 1) if 0 <= c < self.num_chunks]
