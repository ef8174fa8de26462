"""Time of a training step: MSC beside plain PyTorch and PyTorch's own parallel forms.

    python benchmarks/step_time.py               # a table; results/step_time.{json,png}
    python benchmarks/step_time.py --models small --groups tp --rounds 3

Two gloo processes with one thread each, or one for a mesh of one rank. Candidates of a group take
turns, a step each per round, so that all of them meet the same moments of the machine; figures are
medians over the rounds, as multiples of the eager step on one rank that is measured in the same
group. The floor is a perfect split of that eager step, the bubble of the schedule, and the
program's transfers at the speed that gloo has in the same rounds. "cpu" is the processor time of
the slower rank, its communication threads included: it tells work from waiting for the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, and for Inductor's compilers
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/step_time.py`

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

from benchmarks import floor, peers  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.models import GPTConfig, random_batch  # noqa: E402
from benchmarks.step_table import draw, table  # noqa: E402

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "small": (GPTConfig(layers=6, hidden=384, heads=6, sequence=256, vocabulary=512), 8),
    "large": (GPTConfig(layers=4, hidden=1024, heads=16, sequence=256, vocabulary=512), 4),
}
"""Each with its global batch."""

Make = Callable[[GPTConfig, peers.Batch], peers.Candidate]
Result = dict[str, Any]


def _msc(mesh: str, backend: str = "aten") -> Make:
    return lambda config, batch: peers.Compiled(config, batch, mesh, backend)


def _group(mesh: str, **others: Make) -> dict[str, Make]:
    return {
        "eager": peers.Eager,
        **others,
        "msc": _msc(mesh),
        "msc inductor": _msc(mesh, "inductor"),
    }


ALONE = "one rank"
GROUPS: dict[str, dict[str, Make]] = {
    ALONE: _group(""),
    "dp=2": _group("dp=2", ddp=peers.DataParallel),
    "tp=2": _group("tp=2", dtensor=peers.TensorParallel),
    "pp=2": _group("pp=2", pipelining=peers.Pipelined),
}
PEER = {ALONE: "eager", "dp=2": "ddp", "tp=2": "dtensor", "pp=2": "pipelining"}
BUBBLE = {"pp=2": 1 / peers.MICRO_BATCHES}
"""Idle fraction of the work of a rank: (stages - 1) / micro-batches."""


def measure_group(model: str, group: str, rounds: int, skip: list[str]) -> Result:
    """Take turns; the same result on both ranks."""
    config, size = MODELS[model]
    batch = random_batch(config, size, seed=1)
    made = {name: make(config, batch) for name, make in GROUPS[group].items() if name not in skip}
    program = made["msc"].program  # type: ignore[attr-defined]
    sent = [floor.transfers(graph) for graph in program.rank_graphs]
    kinds = sorted({transfer for found in sent for transfer in found}, key=str)
    alone = group == ALONE
    speeds: dict[floor.Transfer, list[float]] = {kind: [] for kind in kinds if not alone}
    times: dict[str, list[float]] = {name: [] for name in made}
    cpu_times: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, candidate in made.items():
            seconds, cpu, loss = _timed(candidate)
            losses[name].append(loss)
            if number > 0:  # the first step allocates and compiles
                times[name].append(seconds)
                cpu_times[name].append(cpu)
        for kind, found in speeds.items():
            found.append(floor.measure(kind))
    _check_losses(losses)
    typical = {kind: statistics.median(found) for kind, found in speeds.items()}
    sending = 0.0 if alone else max(floor.seconds(found, typical) for found in sent)
    split = statistics.median(times["eager"]) / dist.get_world_size()
    return {
        "model": model,
        "group": group,
        "peer": PEER[group],
        "seconds": times,
        "cpu_seconds": cpu_times,
        "floor": {
            "split": split,
            "bubble": split * BUBBLE.get(group, 0.0),
            "transfers": sending,
        },
        "transfers": [
            [kind, count, str(dtype), found[kind, count, dtype], typical[kind, count, dtype]]
            for found in sent[:1]
            for kind, count, dtype in speeds
            if found[kind, count, dtype]
        ],
    }


def _timed(candidate: peers.Candidate) -> tuple[float, float, float]:
    """Seconds and processor seconds of one step, the slower rank's, and the whole batch's loss."""
    mine = torch.zeros(3, dtype=torch.float64)
    dist.barrier()
    if dist.get_rank() in candidate.ranks:
        start, cpu = time.perf_counter(), time.process_time()
        loss = candidate.step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        mine = torch.tensor([seconds, cpu, loss], dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    slowest = [max(float(values[index]) for values in found) for index in (0, 1)]
    loss = candidate.whole_loss([float(found[rank][2]) for rank in candidate.ranks])
    return slowest[0], slowest[1], loss


def _check_losses(losses: dict[str, list[float]]) -> None:
    """All candidates train the same model: their losses agree at every step."""
    for name, own in losses.items():
        for step, (loss, expected) in enumerate(zip(own, losses["eager"], strict=True)):
            if not abs(loss - expected) <= 1e-3 * abs(expected):
                raise RuntimeError(f"{name} has loss {loss} in step {step}, eager {expected}")


def _worker(
    rank: int,
    ranks: int,
    folder: str,
    models: list[str],
    groups: list[str],
    rounds: int,
    skip: list[str],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=20),
    )
    results = []
    for model in models:
        for group in groups:
            result = measure_group(model, group, rounds, skip)
            results.append(result)
            gc.collect()
            if rank == 0:
                print(f"{model} {group}\n{table([result])}\n", file=sys.stderr, flush=True)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _run(
    ranks: int, models: list[str], groups: list[str], rounds: int, skip: list[str]
) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, models, groups, rounds, skip)
        spawn(_worker, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
        results: list[Result] = json.loads(Path(folder, "results.json").read_text())
    return results


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip", nargs="+", default=[], help="candidates, such as 'msc inductor'")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and PNG")
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    results = [
        result
        for ranks, groups in ((1, [ALONE]), (2, [g for g in GROUPS if g != ALONE]))
        if (chosen := [group for group in groups if group in options.groups])
        for result in _run(ranks, options.models, chosen, options.rounds, options.skip)
    ]
    load.append(os.getloadavg()[0])
    print(table(results))
    print(f"\nload average of the machine before and after: {load[0]:.1f}, {load[1]:.1f}")
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "hardware": hardware(),
        "load_average": load,
        "ranks": 2,
        "threads_per_rank": 1,
        "dtype": "float32",
        "micro_batches_of_pipelines": peers.MICRO_BATCHES,
        "models": {
            name: {**asdict(config), "batch": size} for name, (config, size) in MODELS.items()
        },
        "results": results,
    }
    (options.out / "step_time.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(results, options.out / "step_time.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
