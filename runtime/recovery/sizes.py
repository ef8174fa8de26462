"""On how many ranks a run can go on, as its ranks tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Size(NamedTuple):
    """A number of ranks, and what becomes of the program on them: dp, and micro-batches."""

    ranks: int
    dp: int
    micro_batches: int


class Sizes:
    """What all programs of the script can run on.

    saved: whether the state of all is saved, so that other ranks can go on from it.
    """

    def __init__(self) -> None:
        self._sizes: list[Size] | None = None
        self.saved = True

    @property
    def known(self) -> bool:
        """Whether a rank has told."""
        return self._sizes is not None

    def to_data(self) -> list[Any]:
        """As JSON, for `from_data`."""
        return [self._sizes, self.saved]

    @staticmethod
    def from_data(data: Sequence[Any]) -> Sizes:
        """What `to_data` has made."""
        found = Sizes()
        sizes, found.saved = data
        found._sizes = None if sizes is None else [Size(*size) for size in sizes]
        return found

    def hear(self, worlds: Sequence[Sequence[int]], saves: bool) -> None:
        """A rank tells of a program: its sizes, the largest first."""
        sizes = [Size(*world) for world in worlds]
        known = sizes if self._sizes is None else self._sizes
        ranks = {size.ranks for size in sizes}
        self._sizes = [size for size in known if size.ranks in ranks]
        self.saved = self.saved and saves

    def of(self, ranks: int) -> Size | None:
        """That of so many ranks, if it is possible."""
        return next((size for size in self._sizes or () if size.ranks == ranks), None)

    def largest(self, most: int, least: int) -> Size | None:
        """The most ranks of `least` to `most` that are possible."""
        return next((size for size in self._sizes or () if least <= size.ranks <= most), None)

    def why_not(self, most: int, least: int) -> str:
        """Why there is no size of `least` to `most` ranks."""
        if self._sizes is None:
            return "no rank has told on how many its program can run"
        shown = ", ".join(str(size.ranks) for size in self._sizes)
        text = f"{most} are left, {least} are wanted, and its program runs on {shown}"
        if len(self._sizes) == 1:
            text += " only (compile it in the script, with mesh='dp=*,..')"
        return text
