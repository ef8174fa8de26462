"""What a compilation carries from pass to pass, besides its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from msc.cost import CostModel
from msc.cost.measurements import Measurements
from msc.ir.data_shard import DataShard
from msc.ir.layout import rank_class
from msc.ir.mesh import Mesh
from msc.ir.optimizer import Optimizer
from msc.ir.passes import Unit
from msc.ir.placement import State
from msc.ir.plan import Plan
from msc.ir.printer import format_graph
from msc.ir.recompute import MemoryBudget
from msc.ir.rewrites import Finding, Rewrite
from msc.ir.structure import Structure
from msc.passes.chunks import Chunk, Key
from msc.passes.differentiate import Differentiated
from msc.passes.schedules.schedule import Schedule
from msc.passes.sharding.axes import Axis
from msc.passes.sharding.batch import BatchPlan
from msc.passes.sharding.partition import Partitioned
from msc.passes.sharding.pins import Pinned
from msc.passes.sharding.placing import Placing
from msc.passes.sharding.search import Placed

StepSeconds = Callable[[Mesh, Sequence[int], Sequence[fx.GraphModule]], float]
"""Of a mesh, the first tp coordinate of each variant, and the graphs of all classes of ranks."""


@dataclass(frozen=True)
class Settings:
    """The options that the passes read.

    memory: bytes per rank, None without a bound. pinned: the user's pins by parameter; plan:
    placements to apply instead of searching; rewrites: changes of the mathematics, in order;
    recompute: what of the activations is recomputed in the backward; measure: the predicted bytes
    of a rank graph, for a budget (the passes do not see the code generator, whose work it models);
    step_seconds: how long their step takes on the cluster, if there is one, to choose a schedule;
    optimizers: of the parameters that are in a group, its hyperparameters; zero: what is split over
    dp: 1 optimizer state, 2 gradients too, 3 parameters too; shard_group: among so many neighbours;
    fuse_loss: whether linear heads become one op with their cross entropy;
    fuse_collectives: whether collectives become one op with their GEMMs, "auto": where that pays on
    a cluster; measured: what `msc tune` found; in_flight: so many gathers, and so many reductions,
    of a group may be on their way.
    """

    mesh: Mesh
    micro_batches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int | None = None  # chunks per stage; None: as many as the schedule usually has
    optimizer: Optimizer | None = None
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    master: torch.dtype | None = None  # of parameters, where the chunks compute in a lower one
    cost: CostModel = field(default_factory=CostModel)
    bucket_bytes: int = 25 * 2**20
    in_flight: int = 32
    zero: int = 0
    shard_group: int | None = None  # None: all of dp
    memory: float | None = None
    separable: bool = True
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    pinned: Pinned = field(default_factory=dict)
    plan: Plan | None = None
    rewrites: tuple[Rewrite, ...] = ()
    recompute: str | MemoryBudget = "none"
    measure: Callable[[fx.GraphModule], int] | None = None
    step_seconds: StepSeconds | None = None
    fuse_loss: bool = False
    fuse_collectives: bool | str = "auto"
    measured: Measurements | None = None

    def optimizer_of(self, name: str) -> Optimizer:
        """The hyperparameters of one parameter."""
        assert self.optimizer is not None
        return self.optimizers.get(name) or self.optimizer.plain()

    @property
    def data_parts(self) -> int:
        """Ranks of dp that share optimizer state, and with it gradients and parameters."""
        if self.zero == 0:
            return 1
        return self.shard_group or self.mesh.axis_size("dp")

    @property
    def data_group(self) -> str:
        """The group of the ranks that share."""
        whole = self.data_parts == self.mesh.axis_size("dp")
        return "dp" if whole else f"dp/{self.data_parts}"

    @property
    def replica_group(self) -> str | None:
        """The group of the ranks of dp that hold the same shards, None if there is one only."""
        whole = self.data_parts == self.mesh.axis_size("dp")
        return None if whole else f"dp%{self.data_parts}"

    @property
    def batch_axes(self) -> tuple[Axis, ...]:
        """The axes that split the batch, major to minor; mb only where samples are separable.

        dp splits each micro-batch, so that a micro-batch has the same samples on every mesh.
        """
        axes = [Axis("mb", self.micro_batches)] if self.separable else []
        axes.append(Axis("dp", self.mesh.axis_size("dp")))
        return tuple(axis for axis in axes if axis.size > 1)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes that shard values, major to minor."""
        tp = Axis("tp", self.mesh.axis_size("tp"))
        return (*self.batch_axes, tp) if tp.size > 1 else self.batch_axes


@dataclass
class Variant:
    """What the passes make for the ranks of some tp coordinates, whose shards have equal shapes.

    Prelude and prologue are whole over tp, so that all variants share them.

    coordinates: those on tp; the first stands for all. suffix: of the graphs' names, "" if there is
    one variant only. at_stage: a block's graphs on a pipeline stage, where they are others.
    """

    coordinates: range
    suffix: str = ""
    local: dict[str, Partitioned] = field(default_factory=dict)
    value_meta: dict[Key, dict[str, Any]] = field(default_factory=dict)
    differentiated: dict[str, Differentiated] = field(default_factory=dict)
    at_stage: dict[tuple[int, str], Differentiated] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)

    def programs(self, stage: int, block: str) -> Differentiated:
        """The graphs of a block on a pipeline stage."""
        return self.at_stage.get((stage, block)) or self.differentiated[block]


class Compilation(Unit):
    """A model on its way to rank graphs: `graphs` and what the passes know about them.

    joins_samples: whether one micro-batch has what could not be split into several, such as a loss
    that is no sum over samples. reduced_together: with zero 2 and 3, of how many micro-batches
    gradients are reduced at once.
    rank_graphs: of each class of ranks: by pipeline stage, and within a stage by variant.
    schedules: what "auto" would take after `schedule`.
    """

    settings: Settings
    fake_mode: Any
    structure: Structure
    prologue: fx.GraphModule | None
    batch: dict[str, BatchPlan]
    prelude_states: dict[str, State]
    placing: Placing | None
    placed: Placed | None
    local_prelude: Partitioned
    local_prologue: Partitioned | None
    variants: list[Variant]
    parameter_states: dict[str, dict[str, State]]
    schedule: Schedule
    schedules: Iterator[Schedule]
    stages_of: dict[str, list[int]]
    input_shapes: dict[str, tuple[int, ...]]
    data_shards: dict[str, DataShard]
    reduced_together: int
    rank_graphs: list[fx.GraphModule]

    def __init__(self, forward: fx.GraphModule, settings: Settings, fake_mode: Any) -> None:
        super().__init__({"forward": forward})
        self.settings = settings
        self.fake_mode = fake_mode
        self.prologue = None
        self.batch = {}
        self.prelude_states = {}
        self.placing = None
        self.placed = None
        self.local_prologue = None
        self.variants = []
        self.parameter_states = {}
        self.notes: list[str] = []
        self.findings: list[Finding] = []
        self.fusions: list[Finding] = []
        self.heads: list[Finding] = []
        self.epilogues: list[Finding] = []
        self.norm_sums: list[Finding] = []
        self.stages_of = {}
        self.input_shapes = {}
        self.data_shards = {}
        self.joins_samples = False
        self.reduced_together = 1
        self.rank_graphs = []

    def texts(self) -> dict[str, str]:
        """The text of every graph, to be compared by `lines_changed`."""
        return {name: format_graph(gm) for name, gm in self.graphs.items()}

    def lines_changed(self, before: Mapping[str, str]) -> int:
        """How many lines of the program's text are new since `before`."""
        changed = 0
        for name, text in self.texts().items():
            old = set(before.get(name, "").splitlines())
            changed += sum(line not in old for line in text.splitlines())
        return changed + sum(name not in self.graphs for name in before)

    def chunk_graphs(self, index: int) -> dict[str, fx.GraphModule]:
        """The graphs of one micro-batch by name, of the class of ranks `rank_graphs[index]`."""
        stage, variant = divmod(index, len(self.variants))
        chunks = [chunk for chunk in self.variants[variant].chunks if chunk.stage == stage]
        found: dict[str, fx.GraphModule] = {}
        for chunk in chunks:
            prefix = f"chunk{chunk.index}." if len(chunks) > 1 else ""
            found[f"{prefix}forward"] = chunk.forward
            if chunk.backward is not None:
                found[f"{prefix}backward"] = chunk.backward
            if chunk.weight_backward is not None:
                found[f"{prefix}weight_backward"] = chunk.weight_backward
        steps = any(kind == "step" for chunk in chunks for kind, _ in chunk.others)
        if self.local_prologue is not None and steps:
            found["prologue"] = self.local_prologue.gm
        return found

    def blocks_on(self, stage: int) -> list[str]:
        """The blocks of a pipeline stage's instances, in order."""
        runs = [self.schedule.runs[chunk] for chunk in self.schedule.stages.chunks(stage)]
        return [self.structure.instances[index].block for run in runs for index in run]

    def class_of(self, rank: int) -> int:
        """The index in `rank_graphs` of a rank's graph."""
        return rank_class(self.settings.mesh, self.tp_bounds, rank)

    @property
    def tp_bounds(self) -> list[int]:
        """The first tp coordinate of each variant."""
        return [variant.coordinates[0] for variant in self.variants]

    @property
    def prologue_names(self) -> list[str]:
        """The step values that the prologue computes, in order."""
        return list(self.prologue.meta["names"]) if self.prologue is not None else []
