"""Images of snapshots in the memory of this host or another, for a rank that goes back to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msc.ir.errors import LostRankError
from msc.runtime.checkpoint.arena import OtherArena
from msc.runtime.recovery.link import MemorySource
from msc.runtime.recovery.transfer import Address, Client, Torn


class DamagedError(LostRankError):
    """A copy in memory is not what was put there; it is not offered again."""


class Images:
    """Gives the images of a snapshot; what lies on other hosts is fetched from their agents."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self._clients: dict[Address, Client] = {}

    def __enter__(self) -> Images:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def get(
        self, rank: int, size: int, ranges: Sequence[tuple[int, int]] | None = None
    ) -> tuple[Tensor, str]:
        """A rank's image of `size` bytes (uint8), and the note beside it.

        ranges: which bytes are needed, None for all; others may be missing. All are read to see
        whether they are intact: each rank looks after its own image. Raises `LostRankError` if the
        host that has it does not give it any more, and `DamagedError`, of one that lies here.
        """
        if rank in self._source.here:
            handle, slot = self._source.here[rank]
            arena = OtherArena(handle, size, slot)
            if ranges is None and arena.mark is not None and not arena.is_intact():
                arena.withdraw()
                raise DamagedError(f"the copy of step {self._source.step} in memory is damaged")
            if arena.mark is None:
                raise LostRankError(f"Rank {rank}'s copy of step {self._source.step} is damaged.")
            return arena.image, arena.note
        address = self._source.elsewhere[rank]
        try:
            return self._fetch(address, rank, size, ranges)
        except (OSError, Torn) as error:
            raise LostRankError(
                f"The snapshot of rank {rank} in step {self._source.step} does not come from "
                f"{address[0]}:{address[1]}: {error}"
            ) from error

    def _fetch(
        self, address: Address, rank: int, size: int, ranges: Sequence[tuple[int, int]] | None
    ) -> tuple[Tensor, str]:
        if address not in self._clients:
            self._clients[address] = Client(address, self._source.token)
        client = self._clients[address]
        image = torch.empty(size, dtype=torch.uint8)
        view = memoryview(image.numpy())  # type: ignore[arg-type]
        wanted = [(0, size)] if ranges is None else ranges
        answer = client.ask(rank, self._source.mark, wanted, intact=ranges is None)
        for start, end in wanted:
            client.take(view[start:end])
        client.finish()
        return image, answer.note


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few ranges as there can be, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
