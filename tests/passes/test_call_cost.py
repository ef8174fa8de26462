"""A call costs on a cluster what the simulator says that it takes."""

from __future__ import annotations

import torch

from msc.cost import Cluster, CostModel
from msc.ir.mesh import Mesh
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Settings
from msc.runtime.simulate.durations import work_of
from tests.passes.fuse_collectives.test_places import LINEAR
from tests.passes.graphs import Forward


def test_work_takes_at_least_a_launch_and_then_what_its_slower_side_takes() -> None:
    cluster = Cluster.load("a100")
    settings = Settings(Mesh.parse("tp=2"), cost=CostModel(cluster))
    build = Forward(torch.bfloat16)
    small = build.call(LINEAR, build.input("x", 2, 4), build.parameter("w", 4, 4))
    large = build.call(LINEAR, build.input("y", 8192, 8192), build.parameter("v", 8192, 8192))
    build.done(small, large)
    assert call_cost(small, settings) == cluster.launch_s
    assert call_cost(large, settings) == work_of(large).seconds(cluster) > cluster.launch_s
    assert call_cost(large, settings) == 2 * 8192**3 / cluster.peak(torch.bfloat16)
