"""What a rank does when it joins a job, counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from msc.ir.errors import CommunicationError
from msc.ir.mesh import Mesh
from msc.ranks import Job

WORLD = 1024


class CountingStore:
    """A store of one process that counts round trips."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.trips: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.trips["set"] += 1
        self.values[key] = value.encode()

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self.trips["wait"] += 1
        if not self.check(keys):
            raise dist.DistStoreError(f"no key within {timeout}")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self.trips["get"] += 1
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.trips["multi_get"] += 1
        return [self.values[key] for key in keys]


def job(rank: int, store: CountingStore) -> Job:
    mesh = Mesh((("dp", WORLD),))
    return Job(mesh, rank, torch.device("cpu"), store, timedelta(seconds=1))  # type: ignore[arg-type]


def others(different: int = 0) -> CountingStore:
    """The store when all ranks but rank 0 have told their facts."""
    store = CountingStore()
    for rank in range(1, WORLD):
        program = "other" if rank == different else "program"
        store.values[f"facts/{rank}"] = json.dumps({"program": program}).encode()
    return store


def test_agreeing_takes_as_many_round_trips_on_any_number_of_ranks() -> None:
    store = others()
    job(0, store).agree({"program": "program"})
    assert store.trips == {"set": 2, "wait": 2, "multi_get": 1, "get": 1}
    store.trips.clear()
    job(7, store).agree({"program": "program"})
    assert store.trips == {"set": 1, "wait": 1, "get": 1}


def test_the_rank_that_differs_is_named() -> None:
    with pytest.raises(CommunicationError, match="The program of rank 77 differs"):
        job(0, others(different=77)).agree({"program": "program"})


def test_the_rank_that_tells_nothing_is_named() -> None:
    store = others()
    del store.values["facts/500"]
    with pytest.raises(CommunicationError, match="'facts/500' did not come from its rank within 1"):
        job(0, store).agree({"program": "program"})
