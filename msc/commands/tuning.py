"""The command that measures a program's calls on this device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from msc.build_target import load_target
from msc.command_exit import guarded
from msc.commands.options import (
    OPTIMIZERS,
    FuseLoss,
    MeshOption,
    MicroBatches,
    OptimizerOption,
    Precision,
    RecomputeOption,
    Schedule,
    ShardGroup,
    Target,
    VirtualStages,
    Zero,
    recompute_of,
)


class Device(StrEnum):
    """On what a program runs."""

    cpu = "cpu"
    cuda = "cuda"


def tune(
    target: Target,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Measurements, as JSON; added to.")],
    mesh: MeshOption = "",
    microbatches: MicroBatches = 1,
    schedule: Schedule = "1f1b",
    virtual_stages: VirtualStages = None,
    zero: Zero = 0,
    shard_group: ShardGroup = None,
    optimizer: OptimizerOption = None,
    precision: Precision = None,
    recompute: RecomputeOption = "none",
    fuse_loss: FuseLoss = False,
    device: Annotated[
        Device | None, typer.Option("--device", help="On which; else CUDA where there is one.")
    ] = None,
) -> None:
    """Measure a program's calls here, in kernels and without, fused and not, for --tuned."""

    def action() -> Callable[[], int]:
        from msc.tuning.measure import tune as measure

        built = load_target(target)
        found = measure(
            built.model,
            built.inputs,
            file,
            device=None if device is None else device.value,
            log=lambda line: print(line, file=sys.stderr),
            loss_fn=built.loss_fn,
            mesh=mesh,
            microbatches=microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            zero=zero,
            shard_group=shard_group,
            optimizer=None if optimizer is None else OPTIMIZERS[optimizer](),
            precision=None if precision is None else precision.value,
            recompute=recompute_of(recompute),
            fuse_loss=fuse_loss,
        )

        def show() -> int:
            print(f"{file}: {len(found.calls)} calls on {found.device}")
            return 0

        return show

    raise typer.Exit(guarded(action, as_json=False))
