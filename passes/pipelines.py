"""The pipeline from a captured forward graph to rank graphs, read top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.pipeline import Pipeline
from msc.passes.build_chunks import BuildChunks
from msc.passes.check_communication import check_communication
from msc.passes.clean_collectives import CleanCollectives
from msc.passes.compilation import Compilation
from msc.passes.cut import cut
from msc.passes.differentiate import differentiate
from msc.passes.fuse_bias import FuseBias
from msc.passes.fuse_sums import FuseSums
from msc.passes.normalize import NORMALIZE
from msc.passes.overlap import Overlap
from msc.passes.place import Place
from msc.passes.rank_graph import build_rank_graph
from msc.passes.reduce_early import ReduceEarly
from msc.passes.shard import Shard
from msc.passes.shard_batch import ShardBatch


@dataclass(frozen=True)
class Cut(UnitPass):
    """Cut the forward graph into a prelude and distinct blocks."""

    name: ClassVar[str] = "cut"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        unit.structure = cut(unit.graphs["forward"])
        unit.graphs = {"prelude": unit.structure.prelude, **unit.structure.blocks}
        return len(unit.graphs)


@dataclass(frozen=True)
class Differentiate(UnitPass):
    """Differentiate every distinct block; collectives become start and wait nodes."""

    name: ClassVar[str] = "differentiate"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        unit.graphs = {}
        for name, local in unit.local.items():
            found = differentiate(local.gm, unit.fake_mode, with_backward=name != "prelude")
            if name == "prelude":
                local.gm = found.forward
                unit.graphs[name] = found.forward
                continue
            unit.differentiated[name] = found
            unit.graphs[f"{name}.forward"] = found.forward
            if found.backward is not None:
                unit.graphs[f"{name}.backward"] = found.backward
        if unit.local_prologue is not None:
            found = differentiate(unit.local_prologue.gm, unit.fake_mode, with_backward=False)
            unit.local_prologue.gm = found.forward
            unit.graphs["prologue"] = found.forward
        return len(unit.graphs)


@dataclass(frozen=True)
class BuildRankGraphs(UnitPass):
    """One step of each class of ranks: schedule, gradient reduction, optimizer."""

    name: ClassVar[str] = "build-rank-graphs"
    numerics: ClassVar[str] = "the sum over micro-batches runs in the schedule's order"
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        stages = unit.settings.mesh.axis_size("pp")
        unit.rank_graphs = [build_rank_graph(unit, stage) for stage in range(stages)]
        for stage, gm in enumerate(unit.rank_graphs):
            unit.graphs[f"rank.pp{stage}"] = gm
        return stages


@dataclass(frozen=True)
class CheckCommunication(UnitPass):
    """Prove that no order of execution deadlocks; changes nothing."""

    name: ClassVar[str] = "check-communication"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        mesh = unit.settings.mesh

        def stage(rank: int) -> int:
            return mesh.coordinate(rank).get("pp", 0)

        check_communication(mesh, lambda rank: unit.rank_graphs[stage(rank)], stage, ("pp",))
        return 0


TRAIN = Pipeline(
    [
        *NORMALIZE,
        Cut(),  # first, so that everything after it is done once for each distinct block
        ShardBatch(),  # forced, hence before the search, which then sees local sizes
        Place(),
        Shard(),
        CleanCollectives(),  # while a conversion and its gradient are one node
        FuseBias(),  # after sharding: a row-parallel bias stays behind its reduce-scatter
        Differentiate(),
        FuseSums(),
        Overlap(),  # after all that changes a block's work
        BuildChunks(),  # after differentiation: costs count the backward as it is
        BuildRankGraphs(),
        ReduceEarly(),  # before the proof, which speaks of the order that runs
        CheckCommunication(),
    ]
)
