"""Work of one block beside the next one's collectives, and that no legal order changes a bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

import msc
from msc.ir.communication import (
    COLLECTIVES,
    FUSED,
    POINT_TO_POINT,
    STARTS,
    WAITS,
    group_of,
    subgraph,
)
from msc.ir.inline import inline
from msc.passes.compilation import Compilation
from msc.passes.overlap_borders import OverlapBorders
from tests import models
from tests.parity.captures import capture_once as capture_once
from tests.passes.graphs import (
    GPT,
    captured,
    compilation,
    layers,
    named_values,
    step,
    through,
    token_batch,
)

pytestmark = pytest.mark.usefixtures("capture_once")


def before(mesh: str = "dp=2,tp=2", number: int = 5) -> Compilation:
    return through("build-chunks", captured(GPT(vocab=64, layers=number), mesh, token_batch(64, 2)))


def exposed(gm: fx.GraphModule) -> int:
    """Collectives of what a chunk calls that no GEMM stands beside."""
    count = 0
    for call in gm.graph.find_nodes(op="call_module"):
        nodes = list(subgraph(gm, call).graph.nodes)
        for start in (node for node in nodes if node.target in COLLECTIVES):
            (wait,) = start.users
            between = nodes[nodes.index(start) : nodes.index(wait)]
            count += not any("linear" in str(node.target) for node in between)
    return count


def test_the_first_gather_of_a_block_is_hidden() -> None:
    unit = before()
    (chunk,) = unit.variants[0].chunks
    assert chunk.backward is not None
    was = exposed(chunk.backward)
    moved = OverlapBorders().run(unit)
    assert moved >= 4
    # all but that of the last layer, which has nothing before it but the head
    assert exposed(chunk.backward) <= was - 4
    called = {str(n.target) for n in chunk.backward.graph.find_nodes(op="call_module")}
    assert len(called) < 6  # the layers in the middle share a graph


def test_layers_more_are_no_work_more() -> None:
    made = []
    for number in (5, 9):
        unit = before(number=number)
        OverlapBorders().run(unit)
        made.append(sum("across" in name for name in unit.graphs))
    assert made[0] == made[1]


def test_nothing_moves_where_nothing_communicates() -> None:
    unit = before("dp=2")
    texts = unit.texts()
    assert OverlapBorders().run(unit) == 0
    assert unit.texts() == texts


def test_module_paths_stay_those_of_the_layer() -> None:
    """The flat view of a rank names for each op the layer that it is of."""
    program = msc.compile(models.build("nanogpt"), models.tokens(), mesh="tp=2")
    flat = program.graphs(0)["backward"]
    found: dict[str, set[str]] = {}
    for node in flat.graph.nodes:
        path = node.meta.get("module_path") or ""
        if path.startswith("h.") and "wgrad" in str(node.target):
            found.setdefault(path.split(".")[1], set()).add(path.split(".", 2)[2])
    assert len({frozenset(names) for names in found.values()}) == 1
    assert len(found) == len(
        {path.split(".")[1] for path in program.parameters if path[:2] == "h."}
    )


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    mesh=st.sampled_from(["tp=2", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2"]),
    fuse=st.booleans(),
    zero=st.sampled_from([0, 1, 2, 3]),
    seed=st.integers(0, 2**32),
)
def test_any_legal_order_gives_the_same_bits(mesh: str, fuse: bool, zero: int, seed: int) -> None:
    """Also where ranks run at any speed: which rank goes on next is drawn."""
    gm = layers(4)
    values = named_values(gm)
    unit = through(
        "check-communication", compilation(gm, mesh, 2, zero=zero, fuse_collectives=fuse)
    )
    losses, grads = step(unit, values)
    generator = random.Random(seed)
    unit.rank_graphs = [shuffle(inline(each), generator) for each in unit.rank_graphs]
    found_losses, found = step(unit, values, pick=generator.choice)
    assert all(torch.equal(a, b) for a, b in zip(losses, found_losses, strict=True))
    assert all(torch.equal(grads[name], found[name]) for name in grads)


def shuffle(gm: fx.GraphModule, generator: random.Random) -> fx.GraphModule:
    """The graph in another legal order.

    What one group or channel has keeps its own; and no wait goes before a start that was before
    it: another rank may need that one to come to what is waited for.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    waiting: dict[fx.Node, set[fx.Node]] = {}
    last: dict[str, fx.Node] = {}
    started: set[fx.Node] = set()
    for node in nodes:
        needed = {operand for operand in node.all_input_nodes if operand.op != "placeholder"}
        if node.target in WAITS or node.target in FUSED:
            needed |= started
        if node.target in STARTS or node.target in FUSED:
            name = channel(node) if node.target in POINT_TO_POINT else group_of(node)
            if name in last:
                needed.add(last[name])
            last[name] = node
            started.add(node)
        waiting[node] = needed
    done: set[fx.Node] = set()
    while waiting:
        ready = [node for node, needed in waiting.items() if needed <= done]
        chosen = generator.choice(ready)
        gm.graph.output_node().prepend(chosen)
        done.add(chosen)
        del waiting[chosen]
    gm.graph.lint()
    return gm


def channel(node: fx.Node) -> str:
    kind = POINT_TO_POINT[node.target]
    return f"{kind} {node.args[2] if kind == 'send' else node.args[1]}"
