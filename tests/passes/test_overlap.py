"""Collectives run beside what does not wait for them, in an order that computes the same."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from msc.ir.communication import COLLECTIVES, WAITS
from msc.passes.overlap import Overlap
from tests.passes.graphs import GPT, captured, through, token_batch


def unit_before(mesh: str = "dp=2,tp=2") -> Any:
    return through("fuse-sums", captured(GPT(vocab=64, layers=4), mesh, token_batch(64, 2)))


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def hidden(gm: fx.GraphModule) -> list[int]:
    """For each collective, how many calls of GEMMs stand between its start and its wait."""
    counts = []
    nodes = calls(gm)
    for start in (n for n in nodes if n.target in COLLECTIVES):
        (wait,) = start.users
        between = nodes[nodes.index(start) : nodes.index(wait)]
        counts.append(sum("linear" in str(node.target) for node in between))
    return counts


def test_the_backward_hides_what_it_can() -> None:
    unit = unit_before()
    gm = unit.graphs["block1.backward"]
    assert sum(hidden(gm)) == 0
    moved = Overlap().run(gm, unit)
    assert moved > 0
    # gather of the output's gradient: nothing to do yet; behind each scatter, and behind the
    # gather between them, stands a weight gradient
    assert [count > 0 for count in hidden(gm)] == [False, True, True, True]
    assert Overlap().run(gm, unit) == 0


@pytest.mark.parametrize("name", ["block1.forward", "block1.backward", "block0.backward"])
def test_order_is_legal_and_collectives_keep_theirs(name: str) -> None:
    unit = unit_before()
    gm = unit.graphs[name]
    before = calls(gm)
    Overlap().run(gm, unit)
    gm.graph.lint()
    after = calls(gm)
    assert set(before) == set(after)
    starts = [node for node in before if node.target in COLLECTIVES]
    assert [node for node in after if node.target in COLLECTIVES] == starts
    assert sum(node.target in WAITS for node in after) == len(starts)


def test_a_block_without_collectives_stays_as_it_is() -> None:
    unit = unit_before("dp=2")
    for gm in (gm for name, gm in unit.graphs.items() if Overlap().applies_to(name)):
        before = calls(gm)
        assert Overlap().run(gm, unit) == 0
        assert calls(gm) == before
