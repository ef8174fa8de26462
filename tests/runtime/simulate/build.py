"""Rank graphs whose times are whole seconds, and how tests simulate them.

On `SECONDS` one `work` takes a second, as does an all-reduce over two ranks and a message of the
same value; nothing else takes time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import fx

from msc.cost import Cluster
from msc.ir.mesh import Mesh
from msc.runtime.simulate import RankClass, SimulationResult, simulate
from tests.runtime.build import ATEN, Builder

SIDE = 8
_BYTES = 8 * SIDE * SIDE
SECONDS = Cluster("seconds", 2 * SIDE**3, math.inf, 1e9, 8, _BYTES, _BYTES, 0, 0, launch_s=0)
IDEAL = Cluster("ideal", 1e12, math.inf, 1e12, 8, math.inf, math.inf, 0, 0, launch_s=0)


def value(build: Builder) -> fx.Node:
    """A placeholder of 8 x 8 numbers."""
    return build.input("x", SIDE, SIDE)


def work(build: Builder, x: fx.Node, seconds: int = 1) -> fx.Node:
    """Products of 8 x 8 matrices, a second each."""
    for _ in range(seconds):
        x = build.call(ATEN.mm.default, x, x)
    return x


def run(
    mesh: str, graphs: Sequence[fx.GraphModule], cluster: Cluster = SECONDS
) -> SimulationResult:
    """Simulate with a class for each rank."""
    parsed = Mesh.parse(mesh)
    classes = [RankClass(f"r{i}", i, 1, graph) for i, graph in enumerate(graphs)]
    return simulate(parsed, cluster, classes, lambda rank: rank, ("pp", "dp", "tp"))


def on_each(mesh: str, program: Callable[[int], fx.GraphModule]) -> SimulationResult:
    """Simulate a program that takes its rank."""
    return run(mesh, [program(rank) for rank in range(Mesh.parse(mesh).size)])
