"""Costs: seconds on a cluster; without one, an order of plans that leaves no axis unused."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msc.cost import Cluster, CostModel

CLUSTER = Cluster("even", 1e12, 1e11, 1e10, 4, 1e9, 1e8, 1e-6, 1e-5)
KINDS = ["all_gather", "reduce_scatter", "all_reduce"]
MODELS = [CostModel(), CostModel(CLUSTER)]


def test_seconds_of_work() -> None:
    assert CostModel(CLUSTER).compute(2e12, 0) == pytest.approx(2.0)
    assert CostModel(CLUSTER).compute(0, 1e10) == pytest.approx(0.1)
    assert CostModel(CLUSTER).compute(2e12, 1e10) == pytest.approx(2.1)


def test_seconds_of_a_ring() -> None:
    model = CostModel(CLUSTER)
    # each of 4 ranks sends 3 messages of a quarter to its neighbour
    assert model.collective("all_gather", 4e9, 4) == pytest.approx(3e-6 + 3.0)
    assert model.collective("all_reduce", 4e9, 4) == pytest.approx(6e-6 + 6.0)


def test_an_axis_beyond_a_node_uses_the_network() -> None:
    model = CostModel(CLUSTER)
    inside, across = model.collective("all_gather", 8e8, 4), model.collective("all_gather", 8e8, 8)
    assert inside == pytest.approx(3e-6 + 0.6)
    assert across == pytest.approx(7e-5 + 7.0)
    wide = CostModel(dataclasses.replace(CLUSTER, devices_per_node=8))
    assert wide.collective("all_gather", 8e8, 8) == pytest.approx(7e-6 + 0.7)


@given(st.sampled_from(MODELS), st.floats(1, 1e12), st.integers(2, 64))
def test_an_all_reduce_is_a_scatter_and_a_gather(
    model: CostModel, payload: float, size: int
) -> None:
    gather, scatter, reduce = (
        model.collective(kind, payload, size)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    assert reduce == pytest.approx(gather + scatter)


@given(st.sampled_from(MODELS), st.sampled_from(KINDS), st.floats(1, 1e12))
def test_a_group_of_one_costs_nothing(model: CostModel, kind: str, payload: float) -> None:
    assert model.collective(kind, payload, 1) == 0


@given(
    st.sampled_from(MODELS),
    st.sampled_from(KINDS),
    st.floats(1, 1e12),
    st.floats(1, 1e12),
    st.integers(2, 64),
)
def test_more_bytes_cost_more(
    model: CostModel, kind: str, payload: float, more: float, size: int
) -> None:
    less = model.collective(kind, payload, size)
    assert model.collective(kind, payload + more, size) >= less > 0


@given(st.integers(64, 4096), st.integers(1, 16), st.sampled_from([2, 4, 8]))
def test_without_a_cluster_work_is_split_whatever_it_sends(
    width: int, tokens: int, size: int
) -> None:
    """A linear that runs whole costs more than to gather its operand and scatter its gradient."""
    model = CostModel()
    flops = 2 * tokens * width * width
    saved = 3 * model.compute(flops, 0) * (1 - 1 / size)
    activations = 4 * tokens * width
    sent = sum(model.collective(kind, activations, size) for kind in KINDS[:2])
    assert saved > sent


def test_a_copy_of_a_weight_costs() -> None:
    for model in MODELS:
        one, two = (model.replicated_parameter(n, 8, 4) for n in (64, 128))
        assert 0 < one < two


@given(st.sampled_from(MODELS), st.integers(1, 1024), st.sampled_from([2, 4, 8, 16]))
def test_a_copy_of_a_weight_costs_more_than_the_messages_that_shard_it(
    model: CostModel, width: int, size: int
) -> None:
    """However small the model: messages without payload, of a reduction each way."""
    messages = 2 * model.collective("all_reduce", 0, size)
    assert model.replicated_parameter(width * width, 1, size) > messages


@given(st.sampled_from(MODELS), st.floats(1, 1e12), st.floats(1, 1e12))
def test_sending_more_costs_more(model: CostModel, payload: float, more: float) -> None:
    assert model.send(payload + more) >= model.send(payload) > 0


@given(st.sampled_from(MODELS), st.floats(1, 1e12), st.sampled_from([2, 4, 8, 16]))
def test_a_bucket_saves_the_messages(model: CostModel, payload: float, size: int) -> None:
    alone = replace(model, message_bytes=10.0).collective("all_reduce", payload, size)
    assert 0 < model.bucketed(payload, size) < alone
