"""The commands `msc ckpt`: see, check, compare, reshard, export and remove checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from msc.command_exit import DIFFERENT, Json, guarded
from msc.ir.errors import InputError, UserError

app = typer.Typer(
    help="See, check, compare, reshard, export and remove checkpoints.", no_args_is_help=True
)

Url = Annotated[
    str, typer.Argument(metavar="FOLDER", help="Where a run saves, or one checkpoint in it.")
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="The folder to write into.")]
Step = Annotated[int | None, typer.Option("--step", help="Of this step; else the newest complete.")]

Answer = tuple[list[str], int]
"""What a command prints, line by line, and its exit code."""


def _answer(action: Callable[[], Answer], as_json: bool = False) -> None:
    """Run a command, and end as `guarded` says; a folder that cannot be used is bad input."""

    def run() -> Callable[[], int]:
        try:
            lines, code = action()
        except OSError as error:
            raise UserError(f"A folder or file cannot be used: {error}") from error

        def show() -> int:
            for line in lines:
                print(line)
            return code

        return show

    raise typer.Exit(guarded(run, as_json))


@app.command()
def ls(url: Url, as_json: Json = False) -> None:
    """List the checkpoints in a folder, newest first."""

    def action() -> Answer:
        from msc.runtime.checkpoint.catalog import checkpoints
        from msc.runtime.checkpoint.storage import open_storage

        found = checkpoints(open_storage(url))
        if as_json:
            return [json.dumps([each.__dict__ for each in found], indent=2)], 0
        states = {True: "complete", False: "incomplete"}
        lines = [f"{each.step:>10}  {states[each.complete]:10}  {each.folder}" for each in found]
        there = "://" in url or Path(url).is_dir()
        why = "" if there else ": there is no such folder"
        return lines or [f"{url} has no checkpoint{why}"], 0

    _answer(action, as_json)


@app.command()
def verify(url: Url, step: Step = None) -> None:
    """Read a checkpoint whole, and compare every byte with its digests."""

    def action() -> Answer:
        from msc.checkpoint.place import find
        from msc.runtime.checkpoint import catalog
        from msc.runtime.checkpoint.manifest import DamagedError

        place = find(url, step)
        try:
            size = catalog.verify(place.storage, place.folder)
        except DamagedError as error:
            return [f"DAMAGED: {place}: {error}"], DIFFERENT
        return [f"ok: {place}, {size:,} bytes"], 0

    _answer(action)


@app.command()
def show(url: Url, step: Step = None, as_json: Json = False) -> None:
    """Print what a checkpoint holds: its run, and every tensor."""

    def action() -> Answer:
        from msc.checkpoint.place import find

        state = find(url, step).open()
        facts = {"step": state.commit.step, "ranks": len(state.parts), **state.commit.state}
        if as_json:
            tensors = {name: each.__dict__ for name, each in state.descriptions.items()}
            return [json.dumps({**facts, "tensors": tensors}, indent=2)], 0
        lines = [f"{name:14} {json.dumps(value)}" for name, value in facts.items()]
        for name, each in sorted(state.descriptions.items()):
            lines.append(f"{each.dtype:10} {list(each.shape)!s:16} {name}")
        return lines, 0

    _answer(action, as_json)


@app.command()
def diff(
    one: Url,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another such folder.")],
    step: Step = None,
    other_step: Annotated[int | None, typer.Option("--other-step", help="Of the second.")] = None,
) -> None:
    """Compare two checkpoints, whatever their layouts, tensor by tensor and bit by bit."""

    def action() -> Answer:
        from msc.checkpoint.compare import differences
        from msc.checkpoint.place import find

        found = list(differences(find(one, step).open(), find(other, other_step).open()))
        lines = [f"{each.name}: {each.what}" for each in found if each.what]
        count = len(lines)
        lines.append(f"{len(found) - count} tensors are equal, {count} differ")
        return lines, DIFFERENT if count else 0

    _answer(action)


@app.command()
def prune(
    url: Url,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many complete ones stay.")],
) -> None:
    """Remove old checkpoints, and incomplete ones, after a newer one was read whole and is intact.

    For folders that no run is saving into.
    """

    def action() -> Answer:
        from msc.runtime.checkpoint.catalog import prune as remove_old
        from msc.runtime.checkpoint.storage import open_storage

        notes: list[str] = []
        removed = remove_old(open_storage(url), keep, set(), tell=notes.append)
        lines = [*(f"removed {folder}" for folder in removed), *notes]
        return lines, DIFFERENT if notes else 0

    _answer(action)


@app.command()
def reshard(
    url: Url,
    target: Target,
    program: Annotated[
        Path, typer.Option("--program", help="Folder of a saved program: for its mesh.")
    ],
    step: Step = None,
) -> None:
    """Write a checkpoint as another mesh would have. A Trainer needs no such help."""

    def action() -> Answer:
        from msc.checkpoint.place import find
        from msc.checkpoint.reshard import reshard as write
        from msc.program import load

        return [f"wrote {write(find(url, step), target, load(program))}"], 0

    _answer(action)


@app.command()
def export(
    url: Url,
    target: Target,
    hf: Annotated[bool, typer.Option("--hf", help="As Hugging Face's safetensors.")] = False,
    step: Step = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Such as bfloat16.")] = None,
    shard_gb: Annotated[float, typer.Option("--shard-gb", help="Largest file, in 1e9 bytes.")] = 5,
) -> None:
    """Write the model's parameters for others to read."""

    def action() -> Answer:
        from msc.checkpoint.export import export as write
        from msc.checkpoint.place import find

        if not hf:
            raise InputError("Say in which form: --hf is the one there is.")
        kind = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not isinstance(kind, torch.dtype):
            raise InputError(f"'{dtype}' is no dtype of torch.")
        files = write(find(url, step), Path(target), kind, int(shard_gb * 1e9))
        return [f"wrote {file}" for file in files], 0

    _answer(action)
