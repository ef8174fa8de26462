"""Memory and time of a step with the head and its loss as one op, against the two ops apart.

    python benchmarks/fused_loss.py             # a table; results/fused_loss.json
    python benchmarks/fused_loss.py --rounds 3  # fewer steps

A small GPT on one rank and one core, with AdamW, in float32 and in bf16-mixed. Memory is the peak
of a step over all storages, counted while it runs (`StorageMeter`) and as predicted
(`program.memory_bytes()`), and of it what is neither parameter, moment nor input. Both ways take
turns, so that a busy machine disturbs them alike; time is processor time, and the ratio the median
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/fused_loss.py`

import msc  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.models import GPTConfig, GPTWithLoss, random_batch  # noqa: E402
from msc.runtime.memory.meter import StorageMeter  # noqa: E402
from msc.runtime.virtual import VirtualExecutor  # noqa: E402

RESULTS = Path(__file__).parent / "results"
VOCABULARIES = (32768, 65536, 131072)
BATCH = 4


@dataclass(frozen=True)
class Row:
    """One vocabulary and precision. Bytes of the two ways: apart, fused.

    measured, predicted: the peak of a step; beyond: what of the measured one is no state.
    ratio: processor time of a step, fused over apart; seconds: of both.
    """

    vocabulary: int
    precision: str
    measured: tuple[int, int]
    predicted: tuple[int, int]
    beyond: tuple[int, int]
    seconds: tuple[float, float]
    ratio: float


class _Way:
    """A program and its arguments, ready to run steps."""

    def __init__(self, config: GPTConfig, precision: str, fuse_loss: bool) -> None:
        torch.manual_seed(0)
        batch = random_batch(config, BATCH, seed=0)
        self.program = msc.compile(
            GPTWithLoss(config),
            batch,
            optimizer=msc.AdamW(),
            precision=precision,
            fuse_loss=fuse_loss,
        )
        graph = self.program.rank_graph(0)
        local = self.program.local_inputs(batch, 0)
        self.executor = VirtualExecutor(self.program.mesh, self.program.rank_graph)
        self.given: list[Tensor] = list(self.program.initial_state(0).arguments(graph, local))

    def step(self) -> float:
        """Processor seconds of a step."""
        start = time.process_time()
        self.executor.run([self.given])
        return time.process_time() - start

    def peak(self) -> int:
        """The most bytes of a step."""
        with StorageMeter(self.given) as meter:
            self.executor.run([self.given])
        most: int = meter.peak
        return most


def measure(config: GPTConfig, precision: str, rounds: int) -> Row:
    """Both ways of one case."""
    ways = [_Way(config, precision, fuse_loss) for fuse_loss in (False, True)]
    measured = [way.peak() for way in ways]
    held = [sum(tensor.nbytes for tensor in way.given) for way in ways]
    times = [[way.step() for way in ways] for _ in range(rounds)]
    apart, fused = (statistics.median(column) for column in zip(*times, strict=True))
    return Row(
        config.vocabulary,
        precision,
        (measured[0], measured[1]),
        (ways[0].program.memory_bytes()[0], ways[1].program.memory_bytes()[0]),
        (measured[0] - held[0], measured[1] - held[1]),
        (apart, fused),
        statistics.median(own / other for other, own in times),
    )


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=RESULTS / "fused_loss.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    names = ("peak MB", "fused", "predicted", "fused", "no state", "fused", "s/step", "time")
    print(f"{'':8}{'':12}" + "".join(f"{name:>10}" for name in names))
    for vocabulary in VOCABULARIES:
        config = GPTConfig(layers=4, hidden=256, heads=4, sequence=256, vocabulary=vocabulary)
        for precision in ("float32", "bf16-mixed"):
            row = measure(config, precision, args.rounds)
            rows.append(row)
            sizes = (*row.measured, *row.predicted, *row.beyond)
            numbers = "".join(f"{size / 1e6:10.0f}" for size in sizes)
            times = f"{row.seconds[0]:10.2f}{row.ratio:10.2f}"
            print(f"{vocabulary:<8}{precision:12}{numbers}{times}", flush=True)
    found = {"hardware": hardware(), "batch": BATCH, "rows": [asdict(row) for row in rows]}
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
