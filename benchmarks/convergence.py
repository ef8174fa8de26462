"""Does it still learn? Loss curves of one small GPT under the rewrites and LAMB, at equal tokens.

    python benchmarks/convergence.py            # tables; results/convergence.{json,png}
    python benchmarks/convergence.py --sweep    # final losses against peak learning rates, one seed
    python benchmarks/convergence.py --resume   # keep the runs that the JSON has already

A byte-level GPT trains on the source text of Python's standard library, all variants on the same
windows of text in the same order: as it is, with the parallel block, with sliding windows, with 4
times the batch under LAMB and under AdamW, and with all of it (block, windows, LAMB). Three seeds
each; a seed draws the initial weights and the order of the text. The loss on held-out text is taken
at equal numbers of tokens. A variant and seed runs in a process of its own, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as it is run as a file

from gpt import GPT, Config  # noqa: E402
from stdlib_text import StdlibText, text  # noqa: E402

import msc  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402

CONFIG = Config(layers=4, hidden=96, heads=4, sequence=128)
WINDOW = 32
BATCH = 16  # sequences of a step; four times as many where the batch is large
TOKENS = 1_500_000
WARMUP = 0.05  # of all steps
HELD_OUT = 128  # sequences
POINTS = 16  # of a curve
SEEDS = (0, 1, 2)
RESULTS = Path(__file__).parent / "results"

Result = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """What is trained: rewrites, optimizer with its peak learning rate, batch over `BATCH`."""

    name: str
    optimizer: str = "AdamW"
    lr: float = 2e-3
    batch: int = 1
    parallel: bool = False
    window: bool = False

    @property
    def rewrites(self) -> list[Any]:
        """The rewrites as `msc.compile` takes them."""
        parallel = [msc.ParallelBlock()] if self.parallel else []
        return [*parallel, msc.SlidingWindow(WINDOW)] if self.window else parallel


VARIANTS = (
    Variant("serial"),
    Variant("parallel block", parallel=True),
    Variant("sliding window", window=True),
    Variant("LAMB, 4x batch", optimizer="LAMB", lr=5e-2, batch=4),
    Variant("AdamW, 4x batch", batch=4),
    Variant("all", optimizer="LAMB", lr=5e-2, batch=4, parallel=True, window=True),
)
SWEPT = {
    "serial": (1e-3, 2e-3, 4e-3),
    "LAMB, 4x batch": (2e-2, 5e-2, 1e-1),
    "AdamW, 4x batch": (2e-3, 4e-3, 8e-3),
}


def train(variant: Variant, seed: int, tokens: int) -> Result:
    """The held-out loss of one run at equally spaced numbers of tokens, from 0 on."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    batch = BATCH * variant.batch
    per_point = max(1, tokens // (POINTS * 4 * BATCH * CONFIG.sequence)) * 4 // variant.batch
    steps = POINTS * per_point
    data = StdlibText(batch, CONFIG.sequence, seed)
    held_out = StdlibText(batch, CONFIG.sequence, 0, held_out=True)
    schedule = msc.LearningRate.cosine(
        variant.lr, steps=steps, warmup=round(WARMUP * steps), final=variant.lr / 10
    )
    optimizer = getattr(msc, variant.optimizer)(lr=schedule, weight_decay=0.1, max_norm=1.0)
    program = msc.compile(
        model, data.rows(0, range(batch)), optimizer=optimizer, rewrites=variant.rewrites
    )
    with msc.Trainer(program, data, seed=seed, log=False) as trainer:
        held = HELD_OUT // batch
        losses = [trainer.evaluate(held_out, held)]
        for _ in range(POINTS):
            trainer.fit(per_point)
            losses.append(trainer.evaluate(held_out, held))
    per_step = batch * CONFIG.sequence
    at = [point * per_point * per_step for point in range(POINTS + 1)]
    return {
        "variant": asdict(variant),
        "seed": seed,
        "steps": steps,
        "tokens": at,
        "losses": losses,
    }


def train_apart(run: tuple[Variant, int], tokens: int) -> Result:
    """`train` in a process of its own."""
    variant, seed = run
    given = json.dumps({"variant": asdict(variant), "seed": seed, "tokens": tokens})
    command = [sys.executable, __file__, "--one", given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: Result = json.loads(done.stdout.splitlines()[-1])
    print(f"{variant.name}, seed {seed}: {found['losses'][-1]:.4f}", file=sys.stderr)
    return found


def train_all(runs: Sequence[tuple[Variant, int]], tokens: int) -> Iterator[Result]:
    """Every run, in order, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda run: train_apart(run, tokens), runs)


@dataclass(frozen=True)
class Difference:
    """Final held-out losses of a variant over the seeds, and against serial, seed by seed."""

    name: str
    finals: list[float]
    differences: list[float]

    @property
    def mean(self) -> float:
        """The mean difference to serial."""
        return statistics.mean(self.differences)

    @property
    def spread(self) -> float:
        """The standard deviation of the differences over the seeds; 0 of one seed."""
        return statistics.stdev(self.differences) if len(self.differences) > 1 else 0.0


def differences(results: Sequence[Result], point: int = -1) -> list[Difference]:
    """How much worse each variant's loss is than serial's, at one point of the curves."""
    losses: dict[str, dict[int, float]] = {}
    for result in results:
        by_seed = losses.setdefault(result["variant"]["name"], {})
        by_seed[result["seed"]] = result["losses"][point]
    serial = losses[VARIANTS[0].name]
    return [
        Difference(name, list(found.values()), [found[seed] - serial[seed] for seed in found])
        for name, found in losses.items()
    ]


def table(results: Sequence[Result]) -> str:
    """Final losses, differences to serial with their spread, and the differences on the way."""
    quarters = [POINTS // 4, POINTS // 2, 3 * POINTS // 4]
    on_the_way = [{d.name: d.mean for d in differences(results, point)} for point in quarters]
    shares = "".join(f"{f'at {p / POINTS:.0%}':>10}" for p in quarters)
    lines = [f"{'':18}{'final loss':>12}{'- serial':>10}{'spread':>9}   -serial{shares}"]
    for each in differences(results):
        early = "".join(f"{found[each.name]:>+10.4f}" for found in on_the_way)
        lines.append(
            f"{each.name:18}{statistics.mean(each.finals):>12.4f}{each.mean:>+10.4f}"
            f"{each.spread:>9.4f}          {early}"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], file: Path) -> None:
    """Curves, mean and range over the seeds; nothing where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(12, 5), layout="constrained")
    whole, late = figure.subplots(1, 2)
    for variant in VARIANTS:
        runs = [r for r in results if r["variant"]["name"] == variant.name]
        tokens = [t / 1e6 for t in runs[0]["tokens"]]
        columns = list(zip(*(r["losses"] for r in runs), strict=True))
        means = [statistics.mean(column) for column in columns]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        half = len(tokens) // 2
        for axes, start in ((whole, 0), (late, half)):
            (line,) = axes.plot(tokens[start:], means[start:], label=variant.name)
            color = line.get_color()
            axes.fill_between(
                tokens[start:], low[start:], high[start:], color=color, alpha=0.15, linewidth=0
            )
    for axes, title in ((whole, "Held-out loss"), (late, "The second half")):
        axes.set_xlabel("million tokens")
        axes.set_ylabel("nats per byte")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    whole.legend()
    figure.savefig(file, dpi=120)


def sweep(tokens: int) -> None:
    """Print final losses against peak learning rates, seed 0."""
    by_name = {variant.name: variant for variant in VARIANTS}
    variants = [
        Variant(**{**asdict(by_name[name]), "lr": lr})
        for name, rates in SWEPT.items()
        for lr in rates
    ]
    for found in train_all([(variant, SEEDS[0]) for variant in variants], tokens):
        variant = found["variant"]
        print(f"{variant['name']:18} lr {variant['lr']:<8g} {found['losses'][-1]:.4f}")


def _kept(file: Path, facts: Result) -> list[Result]:
    """The results in a file that was written for the same text, model and number of tokens."""
    if not file.exists():
        return []
    found: Result = json.loads(file.read_text())
    results: list[Result] = found.pop("results")
    same = {name: value for name, value in found.items() if name != "hardware"}
    if same != {name: value for name, value in facts.items() if name != "hardware"}:
        raise SystemExit(f"{file} is of another model or text: run without --resume")
    return results


def main() -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--one", help="print one run, given as JSON, as JSON")
    parser.add_argument("--sweep", action="store_true", help="learning rates instead of curves")
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="that a run trains on")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and PNG")
    options = parser.parse_args()
    if options.one:
        run = json.loads(options.one)
        print(json.dumps(train(Variant(**run["variant"]), run["seed"], run["tokens"])))
        return 0
    if options.sweep:
        sweep(options.tokens)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "convergence.json"
    facts: Result = {
        "model": asdict(CONFIG),
        "window": WINDOW,
        "tokens": options.tokens,
        "text_bytes": len(text()),
        "hardware": hardware(),
    }
    runs = [(variant, seed) for seed in SEEDS for variant in VARIANTS]
    results = [
        each
        for each in (_kept(file, facts) if options.resume else [])
        if (Variant(**each["variant"]), each["seed"]) in runs
    ]
    ended = [(Variant(**each["variant"]), each["seed"]) for each in results]
    for each in train_all([run for run in runs if run not in ended], options.tokens):
        results.append(each)
        file.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    print(table(results))
    draw(results, options.out / "convergence.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
