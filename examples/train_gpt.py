"""Train a byte-level GPT on the source text of Python's standard library, on any mesh.

python examples/train_gpt.py --mesh pp=2,tp=2          starts the ranks on this machine
torchrun --nproc-per-node 4 examples/train_gpt.py --mesh pp=2,tp=2
msc run --nproc 4 --standby 1 examples/train_gpt.py --mesh pp=2,tp=2 --checkpoint saves --every 5
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from gpt import GPT, Config
from stdlib_text import StdlibText

import msc
from msc.launch import launch, under_torchrun


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    config = Config()
    parser.add_argument("--mesh", default="pp=2,tp=2", help="axes and their sizes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="samples of one step, over all ranks")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument(
        "--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zb-h1, zb-v or auto"
    )
    parser.add_argument("--backend", default="aten", help="aten or inductor")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=config.layers)
    parser.add_argument("--hidden", type=int, default=config.hidden)
    parser.add_argument("--heads", type=int, default=config.heads)
    parser.add_argument("--sequence", type=int, default=config.sequence)
    parser.add_argument("--evaluate", type=int, default=0, help="held-out batches to score at last")
    parser.add_argument("--checkpoint", help="a folder to save into, and to go on from")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--json", type=Path, help="a file for losses and speed")
    parser.add_argument("--weights", type=Path, help="a file for the trained parameters")
    parser.add_argument("--dump", type=Path, help="a folder for graphs and the result of each pass")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[GPT, StdlibText]:
    """The model and its data; every rank builds the same."""
    torch.manual_seed(args.seed)
    config = replace(
        Config(),
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        sequence=args.sequence,
    )
    return GPT(config), StdlibText(args.batch, args.sequence, args.seed)


def train(args: argparse.Namespace) -> None:
    """One rank's run."""
    first = os.environ.get("RANK", "0") == "0"
    model, data = build(args)
    program = msc.compile(
        model,
        data.rows(0, range(args.batch)),
        mesh=args.mesh,
        optimizer=msc.AdamW(lr=args.lr, weight_decay=0.1),
        microbatches=args.microbatches,
        schedule=args.schedule,
        backend=args.backend,
    )
    if args.dump is not None and first:
        program.dump(args.dump)
    checkpoint = None
    if args.checkpoint is not None:
        checkpoint = msc.Checkpoint(args.checkpoint, every=args.every)
    with msc.Trainer(program, data, seed=args.seed, checkpoint=checkpoint) as trainer:
        started = time.perf_counter()
        before = trainer.step
        trainer.fit(max(0, args.steps - before))
        seconds = time.perf_counter() - started
        found = {
            "mesh": args.mesh,
            "losses": trainer.losses,
            "seconds": seconds,
            "tokens_per_second": (trainer.step - before) * args.batch * args.sequence / seconds,
        }
        if args.evaluate:
            held_out = StdlibText(args.batch, args.sequence, args.seed, held_out=True)
            found["held_out_loss"] = trainer.evaluate(held_out, steps=args.evaluate)
        weights = trainer.state_dict() if args.weights is not None else {}
        if trainer.rank == 0:
            report(args, found)
            if args.weights is not None:
                torch.save(weights, args.weights)


def report(args: argparse.Namespace, found: dict[str, object]) -> None:
    """Print the last facts, and write all of them if a file was asked for."""
    losses = found["losses"]
    assert isinstance(losses, list)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {found['tokens_per_second']:,.0f} tokens/s")
    if "held_out_loss" in found:
        print(f"held-out loss {found['held_out_loss']:.4f}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    """Start the ranks, or be one of them; returns the exit code."""
    args = parse()
    try:
        size = msc.Mesh.parse(args.mesh).size
        if size > 1 and not under_torchrun():
            return launch(sys.argv, size)
        train(args)
    except msc.UserError as error:
        if os.environ.get("RANK", "0") == "0":  # the same on every rank: say it once
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except msc.MSCError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
