"""The commands about a run: start it, say who holds it up, say where its time went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from msc.command_exit import DIFFERENT, Json, guarded
from msc.launch import launch
from msc.run_folder import diagnose
from msc.run_report import ranks_without_account, report_json, report_text, run_accounts


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


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder that Trainer(run=..) was given.")],
    as_json: Json = False,
) -> None:
    """Say where the time of a run went, class by class, and its effective training time."""

    def action() -> Callable[[], int]:
        found = run_accounts(run)

        def show() -> int:
            without = ranks_without_account(run, found)
            if as_json:
                print(json.dumps(report_json(found, without), indent=2))
            else:
                print(report_text(found, without))
            return 0

        return show

    raise typer.Exit(guarded(action, as_json))


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
