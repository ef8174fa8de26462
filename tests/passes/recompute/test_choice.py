"""The integer program finds what trying every choice finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from msc.ir.mesh import Mesh
from msc.ir.torch_private import storage_key
from msc.passes.call_cost import call_cost, is_view
from msc.passes.compilation import Settings
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.choice import Candidates, StageProgram
from msc.passes.recompute.kept_bytes import kept_bytes
from msc.passes.recompute.rewrite import can_be_saved, recompute, recomputed, saved_nodes
from tests.passes.recompute.blocks import mlp, normed

ATEN = torch.ops.aten
SETTINGS = Settings(Mesh.parse(""))
COPIES = 3


def cost(node: fx.Node) -> float:
    return call_cost(node, SETTINGS)


def every_choice(found: Differentiated) -> Iterator[tuple[float, int]]:
    """Cost and saved bytes of all copies, for every set of calls that may run again."""
    saved = saved_nodes(found)
    calls = [node for node in found.forward.graph.nodes if node.op == "call_function"]
    for flags in itertools.product((False, True), repeat=len(calls)):
        allowed = {node for node, flag in zip(calls, flags, strict=True) if flag}
        again = recomputed(saved, allowed)
        kept = {node for node in saved if node not in again}
        kept |= {o for node in again for o in node.all_input_nodes if o not in again}
        assert all(map(can_be_saved, kept))
        sizes = {storage_key(node.meta["val"]): kept_bytes(node) for node in kept}
        yield COPIES * sum(map(cost, again)), COPIES * sum(sizes.values())


@pytest.mark.parametrize("block", [mlp, normed])
def test_no_choice_is_cheaper(block: object) -> None:
    found: Differentiated = block()  # type: ignore[operator]
    choices = list(every_choice(found))
    program = StageProgram(
        [Candidates("block", found.forward, tuple(saved_nodes(found)), COPIES)], cost
    )
    sizes = sorted({size for _, size in choices})
    assert len(sizes) > 2
    for limit in (*sizes, sizes[-1] + 1, sizes[0] - 1):
        best = min((price for price, size in choices if size <= limit), default=None)
        chosen = program.cheapest(limit)
        if best is None:
            assert chosen is None
            continue
        assert chosen is not None
        assert chosen.cost == pytest.approx(best)
        assert chosen.saved_bytes <= limit
    assert program.leanest().saved_bytes == sizes[0]


def test_a_choice_is_what_the_rewrite_saves() -> None:
    found = mlp()
    program = StageProgram([Candidates("block", found.forward, tuple(saved_nodes(found)), 1)], cost)
    chosen = program.leanest()
    after = recompute(found, chosen.again["block"])
    kept = {storage_key(n.meta["val"]): kept_bytes(n) for n in saved_nodes(after)}
    assert sum(kept.values()) == chosen.saved_bytes == 8 * 4 * 8


def test_views_cost_nothing_and_parameters_take_nothing() -> None:
    found = mlp()
    nodes = {node.name: node for node in found.forward.graph.nodes}
    views = [node for node in nodes.values() if node.target is ATEN.transpose.int]
    assert views
    assert all(is_view(node) and cost(node) == 0 for node in views)
    assert kept_bytes(nodes["up"]) == 0
    assert kept_bytes(nodes["x"]) == 8 * 4 * 8
