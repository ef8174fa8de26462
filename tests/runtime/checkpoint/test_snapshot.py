"""Copies beside the step: a value may change after `settle`, and not before."""

from __future__ import annotations

import threading

import pytest
import torch

from msc.ir import actions
from msc.ir.mesh import Mesh
from msc.ir.torch_private import copy_each_
from msc.runtime.checkpoint import snapshot
from msc.runtime.checkpoint.snapshot import Snapshots
from msc.runtime.process import WRITING, ProcessRank

CPU = torch.device("cpu")


def test_settle_waits_for_the_copy_and_not_for_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy, follow, followed = threading.Event(), threading.Event(), threading.Event()

    def late(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy.wait(60)
        copy_each_(targets, sources)

    def then() -> None:
        follow.wait(60)
        followed.set()

    monkeypatch.setattr(snapshot, "copy_each_", late)
    value, slot = torch.arange(4.0), torch.zeros(4)
    snapshots = Snapshots(CPU)
    snapshots.begin([value], [slot], then)
    assert torch.equal(slot, torch.zeros(4))  # the loop goes on at once
    copy.set()
    snapshots.settle()
    value.fill_(-1)
    assert torch.equal(slot, torch.arange(4.0))
    assert not followed.is_set()
    follow.set()
    snapshots.finish()
    assert followed.is_set()
    snapshots.settle()
    snapshots.close()


def test_an_error_of_a_copy_comes_out() -> None:
    snapshots = Snapshots(CPU)
    snapshots.begin([torch.zeros(3)], [torch.zeros(4)], lambda: None)
    with pytest.raises(RuntimeError, match="size"):
        snapshots.settle()
    with pytest.raises(RuntimeError, match="size"):
        snapshots.finish()
    snapshots.close()


def test_every_action_that_writes_is_told_before_it_runs() -> None:
    order: list[str] = []
    rank = ProcessRank(Mesh.parse(""), 0, _NoGroups(), {}, lambda: order.append("before"))  # type: ignore[arg-type]
    assert {action.__name__ for action in actions.UPDATES} < set(WRITING)
    for number, name in enumerate(WRITING):
        with pytest.raises(TypeError):
            getattr(rank, name)()
        assert len(order) == number + 1


class _NoGroups:
    backend = "gloo"
