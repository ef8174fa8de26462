"""Seconds of a communication: by hand inside a node and across nodes, and what must be so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msc.cost import Cluster, CostModel
from msc.cost.collectives import collective_seconds, send_seconds
from msc.cost.topology import Span

CLUSTER = Cluster("even", 1e12, 1e11, 1e10, 4, 1e9, 1e8, 1e-6, 1e-5)
KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
SPANS = st.builds(
    lambda nodes, each: Span(nodes * each, nodes, each), st.integers(1, 64), st.integers(1, 8)
)


def seconds(kind: str, payload: float, size: int, nodes: int = 1) -> float:
    return collective_seconds(CLUSTER, kind, payload, Span(size, nodes, size // nodes))


def test_a_ring_inside_a_node() -> None:
    # each of 4 ranks sends 3 messages of a quarter to its neighbour
    assert seconds("all_gather", 4e9, 4) == pytest.approx(3e-6 + 3.0)
    assert seconds("all_reduce", 4e9, 4) == pytest.approx(6e-6 + 6.0)
    for kind in KINDS[:3]:
        assert seconds(kind, 4e9, 4) == pytest.approx(CostModel(CLUSTER).collective(kind, 4e9, 4))


def test_a_ring_across_nodes_uses_the_adapters_of_all_members() -> None:
    # 2 of 8 steps cross nodes; 4 adapters of 1e8 bytes a second each carry a quarter of the ring
    assert seconds("all_gather", 8e8, 12, 3) == pytest.approx(9e-6 + 2e-5 + 8e8 * 11 / 12 / 4e8)
    assert seconds("all_gather", 8e8, 3, 3) == pytest.approx(2e-5 + 8e8 * 2 / 3 / 1e8)


def test_links_inside_a_node_bound_many_adapters() -> None:
    wide = Cluster("wide", 1e12, 1e11, 1e10, 16, 1e9, 1e8, 1e-6, 1e-5)
    found = collective_seconds(wide, "all_gather", 8e8, Span(32, 2, 16))
    assert found == pytest.approx(30e-6 + 1e-5 + 8e8 * 31 / 32 / 1e9)


def test_a_small_all_reduce_takes_a_tree() -> None:
    # up and down: 3 steps inside a node, 10 across 1024 nodes
    assert seconds("all_reduce", 8, 4096, 1024) == pytest.approx(
        2 * (3e-6 + 10e-5 + 8 / 4e8), rel=1e-12
    )
    assert seconds("all_gather", 8, 4096, 1024) > 1023e-5


def test_an_all_to_all_splits_what_a_rank_sends() -> None:
    # of 8 ranks on 2 nodes, 3 peers are near and 4 are far
    expected = 3e-6 + 4e-5 + max(3 / 8 * 8e8 / 1e9, 4 / 8 * 8e8 / 1e8)
    assert seconds("all_to_all", 8e8, 8, 2) == pytest.approx(expected)


def test_a_message() -> None:
    assert send_seconds(CLUSTER, 1e9, across_nodes=False) == pytest.approx(1e-6 + 1.0)
    assert send_seconds(CLUSTER, 1e9, across_nodes=True) == pytest.approx(1e-5 + 10.0)


@given(st.sampled_from(KINDS), SPANS, st.floats(1, 1e12), st.floats(0, 1e12))
def test_more_bytes_take_longer(kind: str, span: Span, payload: float, more: float) -> None:
    less = collective_seconds(CLUSTER, kind, payload, span)
    assert collective_seconds(CLUSTER, kind, payload + more, span) >= less
    assert (less > 0) == (span.size > 1)


@given(SPANS, st.floats(1, 1e12))
def test_an_all_reduce_is_no_slower_than_a_scatter_and_a_gather(span: Span, size: float) -> None:
    gather, scatter, reduce = (
        collective_seconds(CLUSTER, kind, size, span)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    assert reduce <= (gather + scatter) * (1 + 1e-12)
