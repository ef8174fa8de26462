"""Reductions are waited for when they have landed; no more than the limit are on their way."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx

import msc
from msc.cost import Cluster, CostModel
from msc.ir.communication import COLLECTIVES, WAITS, group_of
from msc.ir.optimizer import AdamW
from msc.ir.printer import format_graph
from msc.passes.compilation import Compilation, Settings
from msc.runtime.memory.predict import MemoryPredictor
from tests import models
from tests.passes.graphs import compilation, layers, through

LAYERS = 6
SETTINGS: dict[str, Any] = {"optimizer": AdamW(lr=0.1), "bucket_bytes": 1024}


def rank_graph(in_flight: int, zero: int, **settings: Any) -> fx.GraphModule:
    """Of the one class of ranks of dp=2, with a bucket for nearly each parameter."""
    unit: Compilation = compilation(
        layers(LAYERS), "dp=2", 1, in_flight=in_flight, zero=zero, **(SETTINGS | settings)
    )
    (found,) = through("check-communication", unit).rank_graphs
    return found


def most_in_flight(gm: fx.GraphModule) -> Counter[str]:
    """By kind of collective, of the groups of dp."""
    most: Counter[str] = Counter()
    now: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.target in COLLECTIVES:
            now[COLLECTIVES[node.target]] += 1
            most |= now
        elif node.target in WAITS:
            start: Any = node.args[0]
            now[COLLECTIVES[start.target]] -= 1
    assert not +now
    return most


def collectives(gm: fx.GraphModule) -> list[tuple[str, str, Any]]:
    """Kind, group and shape of each, as a group starts them."""
    found = [n for n in gm.graph.nodes if n.target in COLLECTIVES]
    return [(COLLECTIVES[n.target], group_of(n), tuple(n.meta["val"].shape)) for n in found]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_than_the_limit(zero: int, limit: int) -> None:
    free, bound = rank_graph(1000, zero), rank_graph(limit, zero)
    kinds = {"all_gather", "reduce_scatter"} if zero else {"all_reduce"}
    of_the_step = {kind for kind, _, _ in collectives(free)}
    assert kinds <= of_the_step
    assert max(most_in_flight(bound).values()) == limit
    assert sorted(collectives(free)) == sorted(collectives(bound))


@pytest.mark.parametrize("zero", [0, 1])
def test_each_kind_keeps_its_order(zero: int) -> None:
    free, bound = collectives(rank_graph(1000, zero)), collectives(rank_graph(1, zero))
    for kind in COLLECTIVES.values():
        assert [c for c in free if c[0] == kind] == [c for c in bound if c[0] == kind]


def test_a_reduction_that_has_landed_gives_its_operand_back() -> None:
    """With all waited for at the end of the step every gradient is there twice."""
    unit = compilation(layers(LAYERS), "dp=2", 1, **SETTINGS)
    (at_the_end,) = through("reduce-early", unit).rank_graphs
    before, after = map(MemoryPredictor().bytes, (at_the_end, rank_graph(1000, 0)))
    gradients = LAYERS * 2 * 16 * 8 * 8  # two matrices of 16 x 8 in float64 in a layer
    assert after < before - gradients / 2


def test_nothing_waits_longer_by_the_model() -> None:
    """On a network that is slow beside the cores a wait that moved up would stall the backward."""
    cluster = dataclasses.replace(Cluster.load("a100"), node_bytes_per_s=1e3, gemm_efficiency=1.0)
    texts = {}
    for last in ("reduce-early", "check-communication"):
        unit = compilation(layers(LAYERS), "dp=2", 1, cost=CostModel(cluster), **SETTINGS)
        texts[last] = format_graph(through(last, unit).rank_graphs[0])
    assert texts["reduce-early"].count("all_reduce") > 2
    assert texts["check-communication"] == texts["reduce-early"]


@pytest.mark.parametrize(
    ("mesh", "zero"), [("dp=2", 0), ("pp=2,dp=2", 1), ("dp=2", 2), ("dp=2", 3)]
)
def test_the_step_is_the_same(mesh: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = functools.partial(Settings, in_flight=1, bucket_bytes=4096)
    monkeypatch.setattr("msc.compiler.Settings", limited)
    ids = models.tokens()
    report = msc.verify(
        models.build("nanogpt"), ids, mesh=mesh, dtype=torch.float64, zero=zero, microbatches=2
    )
    assert report.ok, str(report)
