"""The commands `msc ckpt`: see, check, compare, reshard, export and remove checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from msc.guarded_command import DIFFERENT, guarded
from msc.ir.errors import InputError

app = typer.Typer(
    help="See, check, compare, reshard, export and remove checkpoints.", no_args_is_help=True
)

Url = Annotated[
    str, typer.Argument(metavar="FOLDER", help="Where a run saves, or one checkpoint in it.")
]
Step = Annotated[int | None, typer.Option("--step", help="Of this step; else the newest complete.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command()
def ls(url: Url, as_json: Json = False) -> None:
    """List the checkpoints in a folder, newest first."""

    def action() -> Callable[[], int]:
        from msc.runtime.checkpoint.catalog import checkpoints
        from msc.runtime.checkpoint.storage import open_storage

        found = checkpoints(open_storage(url))

        def show() -> int:
            if as_json:
                print(json.dumps([each.__dict__ for each in found], indent=2))
            for each in () if as_json else found:
                state = "complete" if each.complete else "incomplete"
                print(f"{each.step:>10}  {state:10}  {each.folder}")
            return 0

        return show

    raise typer.Exit(guarded(action, as_json))


@app.command()
def verify(url: Url, step: Step = None) -> None:
    """Read a checkpoint whole, and compare every byte with its digests."""

    def action() -> Callable[[], int]:
        from msc.checkpoint_tools import find
        from msc.runtime.checkpoint import catalog
        from msc.runtime.checkpoint.manifest import DamagedError

        place = find(url, step)
        try:
            size = catalog.verify(place.storage, place.folder)
        except DamagedError as error:
            text, code = f"DAMAGED: {place}: {error}", DIFFERENT
        else:
            text, code = f"ok: {place}, {size:,} bytes", 0

        def show() -> int:
            print(text)
            return code

        return show

    raise typer.Exit(guarded(action, as_json=False))


@app.command()
def show(url: Url, step: Step = None, as_json: Json = False) -> None:
    """Print what a checkpoint holds: its run, and every tensor."""

    def action() -> Callable[[], int]:
        from msc.checkpoint_tools import find

        place = find(url, step)
        state = place.open()
        facts = {"step": state.commit.step, "ranks": len(state.parts), **state.commit.state}

        def print_it() -> int:
            if as_json:
                tensors = {name: each.__dict__ for name, each in state.descriptions.items()}
                print(json.dumps({**facts, "tensors": tensors}, indent=2))
                return 0
            for name, value in facts.items():
                print(f"{name:14} {json.dumps(value)}")
            for name, each in sorted(state.descriptions.items()):
                print(f"{each.dtype:10} {list(each.shape)!s:16} {name}")
            return 0

        return print_it

    raise typer.Exit(guarded(action, as_json))


@app.command()
def diff(
    one: Url,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another such folder.")],
    step: Step = None,
    other_step: Annotated[int | None, typer.Option("--other-step", help="Of the second.")] = None,
) -> None:
    """Compare two checkpoints, whatever their layouts, tensor by tensor and bit by bit."""

    def action() -> Callable[[], int]:
        from msc.checkpoint_tools import differences, find
        from msc.runtime.checkpoint.manifest import DamagedError

        states = find(one, step).open(), find(other, other_step).open()
        try:
            found = list(differences(*states))
        except DamagedError as error:
            raise InputError(f"A checkpoint is damaged: {error}.") from error
        different = [each for each in found if each.what]

        def show_it() -> int:
            for each in different:
                print(f"{each.name}: {each.what}")
            print(f"{len(found) - len(different)} tensors are equal, {len(different)} differ")
            return DIFFERENT if different else 0

        return show_it

    raise typer.Exit(guarded(action, as_json=False))


@app.command()
def prune(
    url: Url,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many complete ones stay.")],
) -> None:
    """Remove old checkpoints, and incomplete ones, after a newer one was read whole and is intact.

    For folders that no run is saving into.
    """

    def action() -> Callable[[], int]:
        from msc.runtime.checkpoint.catalog import prune as remove_old
        from msc.runtime.checkpoint.storage import open_storage

        notes: list[str] = []
        removed = remove_old(open_storage(url), keep, set(), tell=notes.append)

        def show_it() -> int:
            for line in [*(f"removed {folder}" for folder in removed), *notes]:
                print(line)
            return DIFFERENT if notes else 0

        return show_it

    raise typer.Exit(guarded(action, as_json=False))


@app.command()
def reshard(
    url: Url,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The folder to write into.")],
    program: Annotated[
        Path, typer.Option("--program", help="Folder of a saved program: for its mesh.")
    ],
    step: Step = None,
) -> None:
    """Write a checkpoint as another mesh would have. A Trainer needs no such help."""

    def action() -> Callable[[], int]:
        from msc.checkpoint_tools import find
        from msc.checkpoint_tools import reshard as write
        from msc.program import load

        written = write(find(url, step), target, load(program))

        def show_it() -> int:
            print(f"wrote {written}")
            return 0

        return show_it

    raise typer.Exit(guarded(action, as_json=False))


@app.command()
def export(
    url: Url,
    folder: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write into.")],
    hf: Annotated[bool, typer.Option("--hf", help="As Hugging Face's safetensors.")] = False,
    step: Step = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Such as bfloat16.")] = None,
    shard_gb: Annotated[float, typer.Option("--shard-gb", help="Largest file, in 1e9 bytes.")] = 5,
) -> None:
    """Write the model's parameters for others to read."""

    def action() -> Callable[[], int]:
        from msc.checkpoint_tools import export as write
        from msc.checkpoint_tools import find

        if not hf:
            raise InputError("Say in which form: --hf is the one there is.")
        kind = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not isinstance(kind, torch.dtype):
            raise InputError(f"'{dtype}' is no dtype of torch.")
        files = write(find(url, step), folder, kind, int(shard_gb * 1e9))

        def show_it() -> int:
            for file in files:
                print(f"wrote {file}")
            return 0

        return show_it

    raise typer.Exit(guarded(action, as_json=False))
