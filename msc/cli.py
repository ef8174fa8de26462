"""The command `msc`: verify, compile, explain, simulate and run models; runs and checkpoints.

`msc/command_exit.py` says what exit codes mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import msc
from msc.build_target import load_target
from msc.checkpoint.commands import app as checkpoint_app
from msc.command_exit import DIFFERENT, guarded
from msc.doctor import doctor
from msc.ir.errors import UserError
from msc.launch import launch
from msc.monitor import beat, monitor
from msc.passes.schedules.rules import SCHEDULES
from msc.pins_file import load_pins
from msc.run_folder import diagnose
from msc.run_report import report_json, report_text, run_accounts
from msc.summary import compile_json, print_compile, print_verify, verify_json

app = typer.Typer(
    name="msc",
    help="Compile an ordinary PyTorch model into per-rank parallel training programs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


app.add_typer(checkpoint_app, name="ckpt")
app.command()(doctor)
app.command()(beat)
app.command()(monitor)


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


_OPTIMIZERS = {
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
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


_FUSE: dict[Fuse, bool | str] = {Fuse.auto: "auto", Fuse.on: True, Fuse.off: False}
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


@app.command()
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
            recompute=_recompute(recompute),
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


@app.command("compile")
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


@app.command()
def explain(
    target: Target,
    module: Annotated[
        str | None, typer.Argument(help="Say why the values of this module lie as they do.")
    ] = None,
    mesh: MeshOption = "",
    microbatches: MicroBatches = 1,
    cluster: ClusterFile = None,
    plan: PlanFile = None,
    pins: PinsFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page that needs nothing else.")
    ] = None,
) -> None:
    """Compile, and say where every value lies, what is sent, and what else there was to choose."""

    def action() -> Callable[[], int]:
        program = _compiled(
            target, pins, mesh=mesh, microbatches=microbatches, cluster=cluster, plan=plan
        )
        explanation = program.explain(module, html=html)

        def show() -> int:
            print(explanation)
            return 0

        return show

    raise typer.Exit(guarded(action, as_json=False))


@app.command()
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


@app.command()
def blame(
    run: Annotated[Path, typer.Argument(help="The folder that Trainer(run=..) was given.")],
    png: Annotated[Path | None, typer.Option("--png", help="Draw it into this file.")] = None,
) -> None:
    """Say which rank holds up the others of a run that hangs, or has hung, and who waits for whom.

    Exit code 1 if there is such a rank.
    """

    def action() -> Callable[[], int]:
        verdict, text = diagnose(run, png)

        def show() -> int:
            print(text)
            return DIFFERENT if verdict.causes else 0

        return show

    raise typer.Exit(guarded(action, as_json=False))


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="The folder that Trainer(run=..) was given.")],
    as_json: Json = False,
) -> None:
    """Say where the time of a run went, class by class, and its effective training time."""

    def action() -> Callable[[], int]:
        found = run_accounts(run)

        def show() -> int:
            print(json.dumps(report_json(found), indent=2) if as_json else report_text(found))
            return 0

        return show

    raise typer.Exit(guarded(action, as_json))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]..", help="A script that trains.")
    ],
    nproc: Annotated[
        int, typer.Option("--nproc", "--nproc-per-node", help="How many ranks, on each node.")
    ],
    nnodes: Annotated[
        int, typer.Option("--nnodes", help="How many nodes; run this on each of them.")
    ] = 1,
    rdzv: Annotated[
        str | None,
        typer.Option(
            "--rdzv",
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Where nodes meet: an address of one of them.",
        ),
    ] = None,
    rdzv_id: Annotated[
        str, typer.Option("--rdzv-id", help="Name of the run, the same on all nodes.")
    ] = "msc",
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", help="Number of this node, if it matters.")
    ] = None,
    spares: Annotated[
        int, typer.Option("--spares", help="Nodes beyond --nnodes that may wait.")
    ] = 0,
    join_timeout: Annotated[
        float, typer.Option("--join-timeout", help="Seconds that nodes are waited for.")
    ] = 600.0,
    copies: Annotated[
        bool, typer.Option(help="Keep copies of snapshots in the memory of another node.")
    ] = True,
    standby: Annotated[
        int, typer.Option("--standby", help="Warm processes that wait to take a rank.")
    ] = 0,
    replacements: Annotated[
        int, typer.Option("--replacements", help="How many ranks may be replaced.")
    ] = 10,
    restarts: Annotated[
        int, typer.Option("--restarts", help="How often all may be started anew from storage.")
    ] = 3,
    min_ranks: Annotated[
        int | None,
        typer.Option("--min-ranks", help="Fewest ranks to go on with, of a program with dp=*."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Folder for events.jsonl and for msc blame.")
    ] = None,
) -> None:
    """Start a script's ranks, and bring the run back when ranks or nodes die, freeze or fail.

    A Trainer inside of fit() goes on with the newest step that all ranks have in memory, else from
    its checkpoints. The exit code is that of the rank whose failure has ended the run.
    """

    def action() -> Callable[[], int]:
        code = launch(
            script,
            nproc,
            standbys=standby,
            replacements=replacements,
            restarts=restarts,
            min_ranks=min_ranks,
            run=folder,
            nnodes=nnodes,
            rdzv=rdzv,
            rdzv_id=rdzv_id,
            node_rank=node_rank,
            spares=spares,
            join_timeout=join_timeout,
            copies=copies,
        )
        return lambda: code

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
        optimizer=None if optimizer is None else _OPTIMIZERS[optimizer](),
        precision=None if precision is None else precision.value,
        recompute=_recompute(recompute),
        **options,
    )


def _recompute(text: str) -> str | msc.MemoryBudget:
    """A policy's name, or a number of bytes as a budget."""
    return msc.MemoryBudget(int(text)) if text.isdecimal() else text


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be written: {error}") from error


def main(arguments: list[str] | None = None) -> Any:
    """The entry point of the command; exits the process."""
    app(args=arguments, prog_name="msc")
