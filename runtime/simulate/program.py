"""Simulate the rank graphs of a program: its ranks, by pipeline stage and tp coordinate."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from torch import fx

from msc.cost import Cluster
from msc.ir.layout import class_names, rank_class
from msc.ir.mesh import Mesh
from msc.runtime.simulate.result import SimulationResult
from msc.runtime.simulate.simulator import RankClass, simulate


def simulate_program(
    mesh: Mesh,
    tp_bounds: Sequence[int],
    graphs: Sequence[fx.GraphModule],
    cluster: Cluster,
    model_flops: float | None = None,
) -> SimulationResult:
    """One step of all ranks of `mesh`; errors as `simulate`.

    tp_bounds: the first tp coordinate of each variant; graphs: of each class of ranks, by stage and
    within a stage by variant; model_flops: of a step on one device.
    """
    stages, dp = mesh.axis_size("pp"), mesh.axis_size("dp")
    variants = list(itertools.pairwise((*tp_bounds, mesh.axis_size("tp"))))
    places = [(stage, *bounds) for stage in range(stages) for bounds in variants]
    names = class_names(stages, tp_bounds)
    classes = [
        RankClass(name, mesh.rank({"pp": stage, "tp": first}), (end - first) * dp, graph)
        for name, (stage, first, end), graph in zip(names, places, graphs, strict=True)
    ]
    class_of = functools.partial(rank_class, mesh, tp_bounds)
    return simulate(mesh, cluster, classes, class_of, model_flops=model_flops)
