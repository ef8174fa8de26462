"""The options that several commands have: how a model is compiled, and what is printed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import msc
from msc.passes.schedules.rules import SCHEDULES


class DType(StrEnum):
    """What parameters and floating inputs are converted to."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    bf16_mixed = "bf16-mixed"


class Optimizer(StrEnum):
    """The optimizers that a rank's program can contain."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    lamb = "lamb"


OPTIMIZERS = {
    Optimizer.adamw: msc.AdamW,
    Optimizer.adam: msc.Adam,
    Optimizer.sgd: msc.SGD,
    Optimizer.lamb: msc.LAMB,
}

Target = Annotated[
    str,
    typer.Argument(
        metavar="PACKAGE.MODULE:BUILD",
        help="A function that returns (model, inputs) or (model, inputs, loss_fn).",
    ),
]
MeshOption = Annotated[
    str, typer.Option("--mesh", help="Axes and sizes, for example pp=2,dp=2,tp=2.")
]
MicroBatches = Annotated[
    int, typer.Option("--microbatches", help="Parts of each dp rank's batch.", show_default=True)
]
Schedule = Annotated[
    str, typer.Option("--schedule", help=f"Pipeline schedule: {', '.join(SCHEDULES)}.")
]
VirtualStages = Annotated[
    int | None, typer.Option("--virtual-stages", help="Chunks of layers per rank of pp.")
]
Zero = Annotated[
    int, typer.Option("--zero", help="What dp ranks split: 0 to 3.", metavar="0|1|2|3")
]
ShardGroup = Annotated[
    int | None, typer.Option("--shard-group", help="How many neighbours on dp split it.")
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster", help="JSON file of an msc.Cluster, or a100 or h100; costs are seconds."
    ),
]
Memory = Annotated[
    int | None, typer.Option("--memory", help="Bytes that one rank may hold.", metavar="BYTES")
]
OptimizerOption = Annotated[
    Optimizer | None, typer.Option("--optimizer", help="Include the optimizer's step.")
]
Precision = Annotated[
    DType | None, typer.Option("--precision", help="Convert parameters and inputs to this.")
]
RecomputeOption = Annotated[
    str,
    typer.Option(
        "--recompute",
        help="What to compute again: none, selective, full, or the bytes that one rank may hold.",
        metavar="POLICY|BYTES",
    ),
]


class Fuse(StrEnum):
    """Whether collectives become one op with the GEMMs beside them."""

    auto = "auto"
    on = "on"
    off = "off"


FuseOption = Annotated[
    Fuse,
    typer.Option(
        "--fuse-collectives",
        help="Make collectives one op with their GEMMs: where it pays on the cluster, on or off.",
    ),
]
FuseLoss = Annotated[
    bool,
    typer.Option("--fuse-loss", help="Never have all logits in memory: make them twice, in parts."),
]
TunedFile = Annotated[
    Path | None, typer.Option("--tuned", help="Go by what 'msc tune' has measured in this file.")
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Take placements from this file; search nothing.")
]
PinsFile = Annotated[
    Path | None,
    typer.Option(
        "--pins",
        help='JSON file of placements to keep, as {"*.q_proj.weight": {"tp": "Shard(0)"}}.',
    ),
]


def recompute_of(text: str) -> str | msc.MemoryBudget:
    """A policy's name, or a number of bytes as a budget."""
    return msc.MemoryBudget(int(text)) if text.isdecimal() else text
