"""Processor time of fused collectives against the collective and its GEMMs, two ranks on gloo.

    python benchmarks/fused_collectives.py          # a table; results/fused_collectives.json
    python benchmarks/fused_collectives.py --quick  # fewer rounds, K=1024 only

M=2048 rows of both ranks together, N=4096, one thread per rank. `gather` is all_gather_matmul,
`gradients` the same with an input gradient and a weight gradient of a gathered gradient, `reduce`
is matmul_reduce_scatter. Unfused is what the process executor runs where ranks share no memory;
`GEMMs` are these alone, so that their ratio to unfused is about the best that fusing can reach. All
ways of a case take turns, and times are processor seconds of the slower rank, medians over the
rounds: a rank that waits on a busy machine uses none. `step` is loss and gradients of a GPT on
tp=2, compiled with and without fused collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/fused_collectives.py`

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

import msc  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.models import GPTConfig, GPTWithLoss, random_batch  # noqa: E402
from msc.ir.mesh import Mesh  # noqa: E402
from msc.ir.ops.linear import linear, linear_dgrad, linear_wgrad  # noqa: E402
from msc.runtime.process import ProcessExecutor, ProcessRank  # noqa: E402
from msc.runtime.process_groups import ProcessGroups  # noqa: E402
from msc.runtime.shared_memory import share  # noqa: E402

RESULTS = Path(__file__).parent / "results"
RANKS = 2
M, N = 2048, 4096
DEPTHS = (1024, 4096)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KINDS = ("gather", "gradients", "reduce")
GOAL = 0.9

STEPS = {
    "small": (GPTConfig(layers=6, hidden=384, heads=6, sequence=256, vocabulary=512), 8),
    "large": (GPTConfig(layers=4, hidden=1024, heads=16, sequence=256, vocabulary=512), 4),
}
"""GPTs, each with its global batch: those of `benchmarks/step_time.py`."""

Way = Callable[[], Any]
Result = dict[str, Any]


def ways(
    kind: str, k: int, dtype: torch.dtype, fused: ProcessRank, apart: ProcessRank
) -> dict[str, Way]:
    """What takes turns: the op in shared memory, the op unfused, and its GEMMs on whole values."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).div_(k**0.5).to(dtype)

    part, whole, w = numbers(M // RANKS, k), numbers(M, k), numbers(N, k)
    if kind == "reduce":
        args: tuple[Any, ...] = (whole, w, None, False, 0, RANKS, "tp", "")
        return {
            "fused": lambda: fused.matmul_reduce_scatter(*args),
            "unfused": lambda: apart.matmul_reduce_scatter(*args),
            "gemms": lambda: linear(whole, w),
        }
    if kind == "gather":
        args = (part, 0, [w], [None], [False], [], [], False, RANKS, "tp", "")
        gemms: Way = lambda: linear(whole, w)  # noqa: E731
    else:
        y, v = numbers(M, N), w.t().contiguous()
        args = (part, 0, [v], [None], [True], [y], [True], False, RANKS, "tp", "")
        gemms = lambda: (linear_dgrad(whole, v), linear_wgrad(whole, y))  # noqa: E731
    return {
        "fused": lambda: fused.all_gather_matmul(*args),
        "unfused": lambda: apart.all_gather_matmul(*args),
        "gemms": gemms,
    }


def step_ways(config: GPTConfig, batch: int) -> dict[str, Way]:
    """A step of a whole model, with fused collectives and without."""
    rank = dist.get_rank()
    inputs = random_batch(config, batch, 0)

    def way(fuse: bool) -> Way:
        torch.manual_seed(0)
        model = GPTWithLoss(config)
        program = msc.compile(model, inputs, mesh=f"tp={RANKS}", fuse_collectives=fuse)
        graph = program.rank_graph(rank)
        executor = ProcessExecutor(program.mesh, graph)
        arguments = program.initial_state(rank).arguments(graph, program.local_inputs(inputs, rank))

        def step() -> Any:
            found = executor.run(arguments)
            return [each for each in (found["loss"], *found["gradients"]) if each is not None]

        return step

    return {"fused": way(True), "unfused": way(False)}


def measure(candidates: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of the slower rank, of each way and round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(-1, rounds):
        for name, way in candidates.items():
            dist.barrier()
            start = time.process_time()
            result = way()
            own = time.process_time() - start
            del result
            both: list[Any] = [None] * RANKS
            dist.all_gather_object(both, own)
            if number >= 0:  # the first touches all memory for the first time
                seconds[name].append(max(both))
    return seconds


def difference(candidates: dict[str, Way]) -> float:
    """The largest difference of fused and unfused results, over the largest number in them."""
    fused, unfused = candidates["fused"](), candidates["unfused"]()
    if isinstance(fused, Tensor):
        fused, unfused = [fused], [unfused]
    return max(
        float((one.double() - other.double()).abs().max() / other.double().abs().max())
        for one, other in zip(fused, unfused, strict=True)
    )


def run_rank(rank: int, folder: str, depths: tuple[int, ...], rounds: int) -> None:
    """One rank of all cases; rank 0 leaves the results in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    mesh = Mesh.parse(f"tp={RANKS}")
    groups = ProcessGroups(mesh, rank, ["tp"])
    memory = share(groups.group("tp"), "tp", RANKS * M * max((N, *depths)) * 4, 600.0)
    assert memory is not None, "two ranks of one host share memory"
    fused = ProcessRank(mesh, rank, groups, {"tp": memory})
    apart = ProcessRank(mesh, rank, groups, {})
    results: list[Result] = []
    for name, dtype in DTYPES.items():
        for k in depths:
            for kind in KINDS:
                candidates = ways(kind, k, dtype, fused, apart)
                seconds = measure(candidates, rounds)
                error = difference(candidates)
                results.append(
                    {"kind": kind, "k": k, "dtype": name, "cpu_seconds": seconds, "error": error}
                )
    for name, (config, batch) in STEPS.items():
        candidates = step_ways(config, batch)
        seconds, error = measure(candidates, rounds), difference(candidates)
        results.append({"kind": "step", "model": name, "cpu_seconds": seconds, "error": error})
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def ratio(result: Result, name: str = "fused") -> float:
    """A way over unfused: the median of the rounds' ratios, since a round's ways are neighbours."""
    found: dict[str, list[float]] = result["cpu_seconds"]
    pairs = zip(found[name], found["unfused"], strict=True)
    return statistics.median(own / unfused for own, unfused in pairs)


def ratios(result: Result) -> dict[str, float]:
    """Fused over unfused, and where the GEMMs are measured these alone over unfused."""
    alone = "gemms" in result["cpu_seconds"]
    return {"ratio": ratio(result)} | ({"bound": ratio(result, "gemms")} if alone else {})


def table(results: list[Result]) -> str:
    """A line per case, in milliseconds."""
    head = f"{'op':<10}{'dtype':<10}{'K':>5}{'GEMMs':>9}{'unfused':>9}{'fused':>9}"
    lines = [f"{head}{'ratio':>8}{'bound':>8}{'error':>10}"]
    for each in results:
        ms = {
            name: f"{1e3 * statistics.median(found):>9.1f}"
            for name, found in each["cpu_seconds"].items()
        }
        bound = f"{ratio(each, 'gemms'):>8.3f}" if "gemms" in ms else f"{'':>8}"
        what = each.get("dtype") or each["model"]
        lines.append(
            f"{each['kind']:<10}{what:<10}{each.get('k', ''):>5}{ms.get('gemms', ''):>9}"
            f"{ms['unfused']}{ms['fused']}{ratio(each):>8.3f}{bound}{each['error']:>10.1e}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="K=1024, three rounds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    depths = DEPTHS[:1] if options.quick else DEPTHS
    rounds = 3 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder, depths, rounds), nprocs=RANKS)  # type: ignore[no-untyped-call]
        results = json.loads(Path(folder, "results.json").read_text())
    load.append(os.getloadavg()[0])
    print(table(results))
    print(f"\ngoal: at most {GOAL}; load average before and after: {load[0]:.1f}, {load[1]:.1f}")
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "hardware": hardware(),
        "load_average": load,
        "ranks": RANKS,
        "threads_per_rank": 1,
        "m": M,
        "n": N,
        "goal": GOAL,
        "results": [{**each, **ratios(each)} for each in results],
    }
    (options.out / "fused_collectives.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
