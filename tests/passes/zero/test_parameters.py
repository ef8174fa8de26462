"""When a step gathers its parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import msc
from msc.batches import Batches
from msc.ir import actions
from msc.ir.communication import COLLECTIVES
from msc.program import Program
from msc.runtime.virtual import VirtualExecutor
from tests import models
from tests.parity.captures import capture_once as capture_once

pytestmark = pytest.mark.usefixtures("capture_once")


def program(**options: Any) -> Program:
    return msc.compile(
        models.build("nanogpt"), models.tokens(), mesh="dp=2", precision="float64", **options
    )


def positions(gm: fx.GraphModule, wanted: Callable[[fx.Node], bool]) -> list[int]:
    return [index for index, node in enumerate(gm.graph.nodes) if wanted(node)]


def is_gather(node: fx.Node) -> bool:
    return COLLECTIVES.get(node.target) == "all_gather"


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_gather_is_under_way_before_the_batch_is_there(zero: int) -> None:
    graph = program(zero=zero).rank_graph(0)
    gathers = positions(graph, is_gather)
    arrived = positions(graph, lambda node: node.target is actions.arrived)
    assert gathers[0] < arrived[0]
    assert len(arrived) == 2
    if zero < 3:  # the first alone: what the first step needs of the network goes before the rest
        waits = positions(graph, lambda node: node.target is actions.unflatten_shards)
        assert len(waits) > 1  # small parameters travel together
        assert gathers[-1] < waits[0]


def test_without_zero_the_batch_is_given() -> None:
    graph = program().rank_graph(0)
    assert not positions(graph, lambda node: node.target is actions.arrived)
    found = Batches(program(), 0, [models.tokens()], torch.device("cpu"))
    ids = torch.zeros(2, 2)
    assert found.while_gathering(lambda: {"ids": ids}) == {"ids": ids}


def test_a_batch_is_loaded_once_and_inside_of_the_step() -> None:
    own = program(zero=1)
    batch = models.tokens()
    loads: list[int] = []

    def inputs(rank: int) -> Any:
        def load() -> dict[str, torch.Tensor]:
            loads.append(rank)
            return own.local_inputs(batch, rank)

        return Batches(own, rank, [batch], torch.device("cpu")).while_gathering(load)

    arguments = [
        own.initial_state(rank).arguments(own.rank_graph(rank), inputs(rank)) for rank in range(2)
    ]
    assert loads == []
    results = VirtualExecutor(own.mesh, own.rank_graph).run(arguments)
    assert sorted(loads) == [0, 1]
    assert torch.equal(results[0]["loss"], own.run_virtual(batch).loss)


def test_blocks_wait_for_their_parameters_one_by_one() -> None:
    """The first forward is open: between two waits a block computes."""
    graph = program(zero=1).rank_graph(0)
    waits = positions(graph, lambda node: node.target is actions.unflatten_shards)
    calls = positions(graph, lambda node: node.op == "call_module")
    for one, other in itertools.pairwise(waits):
        assert any(one < call < other for call in calls)
