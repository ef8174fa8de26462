"""A rank among others that check each other: how they reach one another, and tell rank 0."""

from __future__ import annotations

import json
import platform
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msc.ir.torch_private import PrefixStore, Store


class Peers:
    """A rank among others that run the same checks.

    size: bytes that each pair exchanges. device: where the tensors are; the process group's.
    version: of MSC.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        size: int,
        device: torch.device,
        timeout: timedelta,
        version: str,
    ) -> None:
        self._version = version
        store.set_timeout(timeout)
        self.store = PrefixStore("doctor", store)
        self.rank, self.world = rank, world
        self.numbers = size // 8
        self.device = device

    # -- what a test replaces to inject a fault

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "msc": self._version,
            "CUDA": str(torch.version.cuda),
        }

    def now(self) -> float:
        """This machine's clock."""
        return time.time()

    def exchange(self, peer: int, given: Tensor) -> Tensor:
        """Send to `peer` and receive as much from it."""
        taken = torch.empty_like(given)
        works = [dist.isend(given, peer), dist.irecv(taken, peer)]
        for work in works:
            assert work is not None
            work.wait()
        return taken

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over all ranks."""
        dist.all_reduce(value)
        return value

    def all_to_all(self, value: Tensor, group: Any) -> Tensor:
        """Row i goes to member i."""
        taken = torch.empty_like(value)
        dist.all_to_all_single(taken, value, group=group)
        return taken

    # -- telling rank 0

    def tell(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, on rank 0; nothing on the others."""
        self.store.set(f"{what}/{self.rank}", json.dumps(value))
        if self.rank:
            return []
        keys = [f"{what}/{rank}" for rank in range(self.world)]
        return [json.loads(raw) for raw in self.store.multi_get(keys)]

    def wait_for_all(self, what: str) -> None:
        """Until all ranks are here; `DistError` after the time-out names no one."""
        if self.store.add(f"{what}/count", 1) == self.world:
            self.store.set(f"{what}/all", "")
        self.store.wait([f"{what}/all"])
