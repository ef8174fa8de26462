"""The pipeline from a captured forward graph to rank graphs, read top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.pipeline import Pipeline
from msc.passes.build_chunks import BuildChunks
from msc.passes.check_communication import check_communication
from msc.passes.choose_schedule import ChooseSchedule
from msc.passes.clean_collectives import CleanCollectives
from msc.passes.compilation import Compilation
from msc.passes.cut import cut
from msc.passes.differentiate import Differentiated, differentiate
from msc.passes.fit_schedule import FitSchedule
from msc.passes.fuse_bias import FuseBias
from msc.passes.fuse_collectives.apply import FuseCollectives
from msc.passes.fuse_epilogue.apply import FuseEpilogue
from msc.passes.fuse_loss.apply import FuseLoss
from msc.passes.fuse_norm_sums import FuseNormSums
from msc.passes.fuse_sums import FuseSums
from msc.passes.merge_branches import MergeBranches
from msc.passes.normalize import NORMALIZE
from msc.passes.overlap import Overlap
from msc.passes.overlap_borders import OverlapBorders
from msc.passes.place import Place
from msc.passes.raise_gate import RaiseGate
from msc.passes.raise_rms_norm import RaiseRMSNorm
from msc.passes.rank_graph import build_rank_graph
from msc.passes.recompute.apply import Recompute
from msc.passes.recompute.keep_budget import KeepBudget
from msc.passes.reduce_early import ReduceEarly
from msc.passes.rewrites.apply import ApplyRewrites
from msc.passes.schedules.messages import releases
from msc.passes.schedules.rules import virtual_stages
from msc.passes.schedules.timeline import start_times
from msc.passes.shard import Shard
from msc.passes.shard_batch import ShardBatch
from msc.passes.sharding.partition import Partitioned
from msc.passes.split_backward import SplitBackward
from msc.passes.wait_early import WaitEarly
from msc.passes.zero.gather_late import GatherLate
from msc.passes.zero.shard_data import ShardData


@dataclass(frozen=True)
class Cut(UnitPass):
    """Cut the forward graph into a prelude and distinct blocks."""

    name: ClassVar[str] = "cut"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        settings = unit.settings
        virtual = virtual_stages(settings.schedule, settings.virtual_stages) or 1
        unit.structure = cut(unit.graphs["forward"], settings.mesh.axis_size("pp") * virtual)
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
        done: dict[int, Differentiated] = {}  # blocks that are alike on several variants
        for variant in unit.variants:
            for name, local in variant.local.items():
                if id(local) not in done:
                    done[id(local)] = self._block(unit, name, variant.suffix, local)
                variant.differentiated[name] = done[id(local)]
        for name, shared in (("prelude", unit.local_prelude), ("prologue", unit.local_prologue)):
            if shared is not None:
                shared.gm = differentiate(shared.gm, unit.fake_mode, with_backward=False).forward
                unit.graphs[name] = shared.gm
        return len(unit.graphs)

    def _block(
        self, unit: Compilation, name: str, suffix: str, local: Partitioned
    ) -> Differentiated:
        found = differentiate(local.gm, unit.fake_mode)
        unit.graphs[f"{name}.forward{suffix}"] = found.forward
        if found.backward is not None:
            unit.graphs[f"{name}.backward{suffix}"] = found.backward
        return found


@dataclass(frozen=True)
class BuildRankGraphs(UnitPass):
    """One step of each class of ranks: schedule, gradient reduction, optimizer."""

    name: ClassVar[str] = "build-rank-graphs"
    numerics: ClassVar[str] = "the sum over micro-batches runs in the schedule's order"
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        unit.rank_graphs = []
        plan = unit.schedule
        starts = start_times(plan.orders, plan.stages, plan.planned)
        for stage, order in enumerate(plan.orders):
            waits = releases(order, plan.stages, starts)
            for variant in unit.variants:
                gm = build_rank_graph(unit, variant, stage, waits)
                unit.rank_graphs.append(gm)
                unit.graphs[f"rank.pp{stage}{variant.suffix}"] = gm
        return len(unit.rank_graphs)


@dataclass(frozen=True)
class CheckCommunication(UnitPass):
    """Prove that no order of execution deadlocks; changes nothing."""

    name: ClassVar[str] = "check-communication"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        axes = ("pp", "tp") if len(unit.variants) > 1 else ("pp",)
        check_communication(
            unit.settings.mesh,
            lambda rank: unit.rank_graphs[unit.class_of(rank)],
            unit.class_of,
            axes,
        )
        return 0


_RANK_GRAPHS = (
    BuildRankGraphs(),
    GatherLate(),
    ReduceEarly(),
    WaitEarly(),  # last: where all of a step's collectives start and end is known
)

_FINISH = (
    SplitBackward(),  # as the schedule says; after recomputation, which changes the backward
    FuseCollectives(),  # when no graph is cut any more, and before what is left is overlapped
    FuseNormSums(),  # before the next, which takes what sums are left
    FuseEpilogue(),  # of products that no collective took; moves them, hence before overlap
    Overlap(),  # after all that changes a block's work
    BuildChunks(),
    OverlapBorders(),  # on chunks, which say which block follows which
    ShardData(_RANK_GRAPHS),  # on chunks: gathers and reductions go between calls of their blocks
    *_RANK_GRAPHS,
)

TRAIN = Pipeline(
    [
        *NORMALIZE,
        ApplyRewrites(),  # on one device's view of the model, before its layers are deduplicated
        MergeBranches(),  # after the rewrites, which make such branches
        RaiseRMSNorm(),  # after the rewrites, which find norms as models write them
        RaiseGate(),
        Cut(),  # first, so that everything after it is done once for each distinct block
        ShardBatch(),  # forced, hence before the search, which then sees local sizes
        Place(),
        Shard(),
        CleanCollectives(),  # while a conversion and its gradient are one node
        FuseBias(),  # after sharding: a row-parallel bias stays behind its reduce-scatter
        FuseLoss(),  # of a head with its bias, on a rank's part of the vocabulary
        Differentiate(),
        FuseSums(),
        Recompute(),  # when it is clear what the backwards read
        ChooseSchedule(),  # costs count the backward as it is, with what runs again
        FitSchedule(_FINISH),  # what the choice needs is known when its rank graphs are there
        KeepBudget(_FINISH),  # the schedule says which blocks and how much is in flight on a stage
        *_FINISH,
        CheckCommunication(),  # of the order that runs
    ]
)
