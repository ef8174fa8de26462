"""The modelled time of a block: what computes, and what of its collectives that does not hide."""

from __future__ import annotations

import torch

from msc.cost import CostModel
from msc.ir.mesh import Mesh
from msc.passes.block_time import block_time
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Settings
from msc.passes.fuse_collectives.places import places
from msc.passes.fuse_collectives.rewrite import fuse
from tests.passes.fuse_collectives.test_apply import SLOW_LINKS
from tests.passes.fuse_collectives.test_places import LINEAR, gather, lowered
from tests.passes.graphs import Forward


def test_block_time_is_what_computing_does_not_hide() -> None:
    """Of a gather that a GEMM of its own group follows, and one that runs beside another GEMM."""
    build = Forward(torch.float32)
    x, w, v = build.input("x", 2, 4), build.parameter("w", 4, 4), build.input("v", 4, 4)
    one = gather(build, x, 0)
    y = build.call(LINEAR, v, w)
    z = build.call(LINEAR, one, w)
    gm = lowered(build.done(y, z))
    unit = Settings(Mesh.parse("tp=2"), cost=CostModel(SLOW_LINKS))
    order = [node for node in gm.graph.nodes if node.op == "call_function"]
    start, wait, own, other = order
    seconds = {node: call_cost(node, unit) for node in order}
    assert seconds[start] == 4 * 4 * 4 / 2 / 1e8
    assert block_time(order, unit) == seconds[start] + seconds[own] + seconds[other]
    beside = block_time([start, own, wait, other], unit)
    assert beside == max(seconds[start], seconds[own]) + seconds[other]
    place = next(places(gm))
    fused = fuse(place)
    (item,) = fused.users
    assert block_time([fused, item, own], unit) == call_cost(fused, unit) + seconds[own]
