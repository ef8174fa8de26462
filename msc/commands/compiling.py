"""The commands about a model: verify, compile, explain and simulate it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import msc
from msc.build_target import load_target
from msc.command_exit import DIFFERENT, Json, guarded
from msc.commands.options import (
    OPTIMIZERS,
    ClusterFile,
    DType,
    Fuse,
    FuseLoss,
    FuseOption,
    Memory,
    MeshOption,
    MicroBatches,
    Optimizer,
    OptimizerOption,
    PinsFile,
    PlanFile,
    Precision,
    RecomputeOption,
    Schedule,
    ShardGroup,
    Target,
    TunedFile,
    VirtualStages,
    Zero,
    recompute_of,
)
from msc.ir.errors import UserError
from msc.pins_file import load_pins
from msc.summary import compile_json, print_compile, print_verify, verify_json

_FUSE: dict[Fuse, bool | str] = {Fuse.auto: "auto", Fuse.on: True, Fuse.off: False}


def verify(
    target: Target,
    mesh: MeshOption = "",
    microbatches: MicroBatches = 1,
    schedule: Schedule = "1f1b",
    virtual_stages: VirtualStages = None,
    zero: Zero = 0,
    shard_group: ShardGroup = None,
    dtype: Annotated[
        DType | None, typer.Option("--dtype", help="Compare in this dtype; float64 is exact.")
    ] = None,
    recompute: RecomputeOption = "none",
    fuse_collectives: FuseOption = Fuse.auto,
    fuse_loss: FuseLoss = False,
    plan: PlanFile = None,
    pins: PinsFile = None,
    as_json: Json = False,
) -> None:
    """Run the parallel program and the single-device one, and compare loss and all gradients."""

    def action() -> Callable[[], int]:
        built = load_target(target)
        report = msc.verify(
            built.model,
            built.inputs,
            loss_fn=built.loss_fn,
            mesh=mesh,
            microbatches=microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            zero=zero,
            shard_group=shard_group,
            precision=None if dtype is None else dtype.value,
            recompute=recompute_of(recompute),
            fuse_collectives=_FUSE[fuse_collectives],
            fuse_loss=fuse_loss,
            plan=plan,
            pins=load_pins(pins),
        )

        def show() -> int:
            if as_json:
                print(json.dumps(verify_json(report), indent=2))
            else:
                print_verify(report)
            return 0 if report.ok else DIFFERENT

        return show

    raise typer.Exit(guarded(action, as_json))


def compile_command(
    target: Target,
    mesh: MeshOption = "",
    microbatches: MicroBatches = 1,
    schedule: Schedule = "1f1b",
    virtual_stages: VirtualStages = None,
    zero: Zero = 0,
    shard_group: ShardGroup = None,
    optimizer: OptimizerOption = None,
    precision: Precision = None,
    cluster: ClusterFile = None,
    memory: Memory = None,
    recompute: RecomputeOption = "none",
    fuse_collectives: FuseOption = Fuse.auto,
    fuse_loss: FuseLoss = False,
    tuned: TunedFile = None,
    plan: PlanFile = None,
    pins: PinsFile = None,
    save_plan: Annotated[
        Path | None, typer.Option("--save-plan", help="Write the placements into this file.")
    ] = None,
    dump: Annotated[
        Path | None, typer.Option("--dump", help="Write all graphs as text into this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile for every rank of a mesh and say what was made. Needs no device and no parameters."""

    def action() -> Callable[[], int]:
        program = _compiled(
            target,
            pins,
            mesh=mesh,
            microbatches=microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            zero=zero,
            shard_group=shard_group,
            optimizer=optimizer,
            precision=precision,
            cluster=cluster,
            memory=memory,
            recompute=recompute,
            fuse_collectives=_FUSE[fuse_collectives],
            fuse_loss=fuse_loss,
            tuned=tuned,
            plan=plan,
        )
        if save_plan is not None:
            program.plan.save(save_plan)
        if dump is not None:
            _write(dump, program.dump)

        def show() -> int:
            if as_json:
                print(json.dumps(compile_json(program, dump), indent=2))
            else:
                print_compile(program, dump)
            return 0

        return show

    raise typer.Exit(guarded(action, as_json))


def explain(
    target: Target,
    module: Annotated[
        str | None, typer.Argument(help="Say why the values of this module lie as they do.")
    ] = None,
    mesh: MeshOption = "",
    microbatches: MicroBatches = 1,
    cluster: ClusterFile = None,
    tuned: TunedFile = None,
    plan: PlanFile = None,
    pins: PinsFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page that needs nothing else.")
    ] = None,
) -> None:
    """Compile, and say where every value lies, what is sent, and what else there was to choose."""

    def action() -> Callable[[], int]:
        program = _compiled(
            target,
            pins,
            mesh=mesh,
            microbatches=microbatches,
            cluster=cluster,
            tuned=tuned,
            plan=plan,
        )
        explanation = program.explain(module, html=html)

        def show() -> int:
            print(explanation)
            return 0

        return show

    raise typer.Exit(guarded(action, as_json=False))


def simulate(
    target: Target,
    cluster: Annotated[
        Path, typer.Option("--cluster", help="JSON file of an msc.Cluster, or a100 or h100.")
    ],
    mesh: MeshOption = "",
    microbatches: MicroBatches = 1,
    schedule: Schedule = "1f1b",
    virtual_stages: VirtualStages = None,
    zero: Zero = 0,
    shard_group: ShardGroup = None,
    optimizer: OptimizerOption = None,
    precision: Precision = None,
    recompute: RecomputeOption = "none",
    fuse_collectives: FuseOption = Fuse.auto,
    fuse_loss: FuseLoss = False,
    tuned: TunedFile = None,
    plan: PlanFile = None,
    pins: PinsFile = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace that ui.perfetto.dev opens.")
    ] = None,
) -> None:
    """Compile for a cluster, and say what a step takes on it: time, MFU, bubble, communication."""

    def action() -> Callable[[], int]:
        program = _compiled(
            target,
            pins,
            mesh=mesh,
            microbatches=microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            zero=zero,
            shard_group=shard_group,
            optimizer=optimizer,
            precision=precision,
            cluster=cluster,
            recompute=recompute,
            fuse_collectives=_FUSE[fuse_collectives],
            fuse_loss=fuse_loss,
            tuned=tuned,
            plan=plan,
        )
        result = program.simulate(cluster)
        if trace is not None:
            _write(trace, result.save_trace)

        def show() -> int:
            print(result)
            return 0

        return show

    raise typer.Exit(guarded(action, as_json=False))


def _compiled(
    target: str,
    pins: Path | None,
    *,
    optimizer: Optimizer | None = None,
    precision: DType | None = None,
    recompute: str = "none",
    **options: Any,
) -> msc.program.Program:
    """Compile what a target builds; `options` are those of `msc.compile`."""
    built = load_target(target)
    return msc.compile(
        built.model,
        built.inputs,
        loss_fn=built.loss_fn,
        pins=load_pins(pins),
        optimizer=None if optimizer is None else OPTIMIZERS[optimizer](),
        precision=None if precision is None else precision.value,
        recompute=recompute_of(recompute),
        **options,
    )


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be written: {error}") from error
