"""What processes tell each other before their kernels meet; one process is enough to be told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from msc.ir.torch_private import HashStore
from msc.runtime.fused_kernels import process
from msc.runtime.process_groups import Communicator


@pytest.fixture
def alone() -> Iterator[Communicator]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Communicator(dist.group.WORLD, (0,), 0)
    dist.destroy_process_group()


def test_devices_that_share_no_memory_give_the_reason(alone: Communicator) -> None:
    found = process._connect(alone, torch.device("cpu"), 256)
    assert found == (
        "its devices have no memory in common: SymmetricMemory does not support device type cpu"
    )


def test_the_first_problem_of_any_rank_is_all_ranks_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to = Communicator(None, (4, 5, 6), 1)

    def exchange(found: list[Any], value: Any, group: Any) -> None:
        found[:] = ["", value, "later"]

    monkeypatch.setattr(dist, "all_gather_object", exchange)
    assert process._agree(to, "here") == "here"
    assert process._agree(to, "") == "later"


def test_ranks_on_several_hosts_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(found: list[Any], value: Any, group: Any) -> None:
        found[:] = ["node-1", value, "node-2"]

    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    monkeypatch.setattr(dist, "all_gather_object", exchange)
    found = process._connect(Communicator(None, (0, 1, 2), 1), torch.device("cpu"), 256)
    assert found == "its ranks are on 2 hosts, and kernels reach the memory of one"
