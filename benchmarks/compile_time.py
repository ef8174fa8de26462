"""CPU seconds and memory that compiling takes, against layers, ranks, and distinct layers.

    python benchmarks/compile_time.py            # a table; results/compile_time.{json,png}

The model is a GPT of the sizes of GPT-3 175B on the meta device, in bfloat16, with 32 micro-batches
of one sequence on each data-parallel rank. Each configuration compiles in a process of its own, so
that its peak memory is its own too. A second table has the same model with everything on that an
option turns on; a third, models whose layers are of 1 to 8 kinds: placing and sharding take time
for each distinct op, not for each layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/compile_time.py`

import msc  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.models import GPT3_175B, MLP, GPTWithLoss  # noqa: E402
from msc.ir.communication import graphs_below  # noqa: E402
from msc.passes.normalize import NORMALIZE  # noqa: E402

Result = dict[str, Any]

MICRO_BATCHES = 32
FULL = "pp=8,dp=192,tp=8"
BY_LAYERS = [(layers, FULL) for layers in (12, 24, 48, 96)]
BY_RANKS = [
    (96, mesh)
    for mesh in (
        "pp=8,dp=1,tp=8",
        "pp=8,dp=8,tp=8",
        "pp=1,dp=192,tp=8",
        "pp=32,dp=192,tp=8",
        "pp=8,dp=192,tp=1",
    )
]
BUDGET = {"cpu_seconds": 30.0, "after_capture": 15.0, "peak_bytes": 4 * 2**30}
EVERYTHING: dict[str, Any] = {
    "schedule": "interleaved",
    "virtual_stages": 6,
    "zero": 2,
    "fuse_collectives": True,
    "cluster": "a100",
}
WITH_EVERYTHING = ("pp=8,dp=8,tp=8", FULL)
BY_KINDS = "dp=8,tp=8"
KINDS = (1, 2, 4, 8)
LAYERS_OF_A_KIND = 2
RESULTS = Path(__file__).parent / "results"


def gpt(layers: int, kinds: int) -> GPTWithLoss:
    """A GPT on the meta device; the MLPs of its layers are of `kinds` widths in turn."""
    with torch.device("meta"):
        model = GPTWithLoss(dataclasses.replace(GPT3_175B, layers=layers))
        for index, block in enumerate(model.gpt.layers):
            block.mlp = MLP(GPT3_175B, expansion=4 + index % kinds)
        return model.to(torch.bfloat16)


def measure(layers: int, mesh: str, kinds: int = 1, **options: Any) -> Result:
    """Compile once in this process."""
    batch = msc.Mesh.parse(mesh).axis_size("dp") * MICRO_BATCHES
    model = gpt(layers, kinds)
    tokens = torch.empty(batch, GPT3_175B.sequence, dtype=torch.int64, device="meta")
    start = time.process_time()
    program = msc.compile(
        model,
        (tokens, tokens),
        mesh=mesh,
        microbatches=MICRO_BATCHES,
        optimizer=msc.AdamW(lr=1e-4),
        **options,
    )
    total = time.process_time() - start
    seconds = _grouped(program.report.cpu_seconds)
    seconds["printing and checking"] = total - sum(seconds.values())
    graphs = {id(g): g for whole in program.rank_graphs for g in graphs_below(whole)}
    return {
        "layers": layers,
        "kinds": kinds,
        "mesh": mesh,
        "ranks": program.mesh.size,
        "global_batch": batch,
        "cpu_seconds": total,
        "after_capture": total - seconds["capture"],
        "passes": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "distinct_blocks": program.report.distinct_blocks,
        "rank_graphs": len(program.rank_graphs),
        "distinct_graphs": len(graphs),
        "nodes": sum(len(graph.graph.nodes) for graph in graphs.values()),
    }


def _grouped(seconds: Any) -> dict[str, float]:
    """Seconds per pass, with the small passes of normalization in one entry."""
    small = {each.name for each in NORMALIZE}
    grouped: dict[str, float] = {}
    for name, value in seconds.items():
        key = "normalize" if name in small else name
        grouped[key] = grouped.get(key, 0.0) + value
    return grouped


def measure_apart(layers: int, mesh: str, kinds: int = 1, **options: Any) -> Result:
    """`measure` in a process of its own."""
    given = json.dumps({"layers": layers, "mesh": mesh, "kinds": kinds, **options})
    command = [sys.executable, __file__, "--one", given]
    print(f"compiling {layers} layers for {mesh}", file=sys.stderr)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: Result = json.loads(done.stdout)
    return result


def table(results: list[Result]) -> str:
    """A column per configuration; CPU seconds per pass, then totals."""
    rows: list[tuple[str, list[str]]] = [
        ("layers", [str(r["layers"]) for r in results]),
        *((a, [str(msc.Mesh.parse(r["mesh"]).axis_size(a)) for r in results]) for a in _AXES),
    ]
    for name in results[-1]["passes"]:
        rows.append((name, [f"{r['passes'].get(name, 0.0):.2f}" for r in results]))
    rows += [
        ("total, CPU seconds", [f"{r['cpu_seconds']:.2f}" for r in results]),
        ("  after capture", [f"{r['after_capture']:.2f}" for r in results]),
        ("peak memory, GiB", [f"{r['peak_bytes'] / 2**30:.2f}" for r in results]),
        ("nodes", [str(r["nodes"]) for r in results]),
        ("distinct graphs", [str(r["distinct_graphs"]) for r in results]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}" + "".join(f"{v:>8}" for v in line) for name, line in rows)


def kinds_table(results: list[Result]) -> str:
    """A line per model: its distinct blocks, and CPU seconds to place and shard them."""
    head = f"{'kinds':>6}{'blocks':>8}{'place':>8}{'shard':>8}{'place per block, ms':>22}"
    lines = [head]
    for r in results:
        place, shard, blocks = r["passes"]["place"], r["passes"]["shard"], r["distinct_blocks"]
        each = 1000 * place / blocks
        lines.append(f"{r['kinds']:>6}{blocks:>8}{place:>8.2f}{shard:>8.2f}{each:>22.1f}")
    return "\n".join(lines)


_AXES = ("pp", "dp", "tp")


def draw(results: list[Result], file: Path) -> None:
    """Stacked bars of seconds per pass; nothing where matplotlib is not installed."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    labels = [f"{r['layers']} layers\n" + r["mesh"].replace(",", "\n") for r in results]
    bottom = [0.0] * len(results)
    for number, name in enumerate(results[-1]["passes"]):
        heights = [r["passes"].get(name, 0.0) for r in results]
        axes.bar(labels, heights, bottom=bottom, label=name, color=colormaps["tab20"](number))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("CPU seconds")
    axes.set_title("Compiling GPT-3 175B")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def main() -> int:
    """Measure, print, write. Exit code 1 if the full configuration is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--one", help="print one configuration, given as JSON, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and PNG")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return 0
    results = [measure_apart(layers, mesh) for layers, mesh in [*BY_LAYERS, *BY_RANKS]]
    print(table(results))
    everything = [measure_apart(96, mesh, **EVERYTHING) for mesh in WITH_EVERYTHING]
    print("\n" + table(everything))
    by_kinds = [measure_apart(LAYERS_OF_A_KIND * kinds, BY_KINDS, kinds) for kinds in KINDS]
    print("\n" + kinds_table(by_kinds))
    full = next(r for r in results if (r["layers"], r["mesh"]) == BY_LAYERS[-1])
    over = [name for name, most in BUDGET.items() if full[name] > most]
    if everything[-1]["cpu_seconds"] > BUDGET["cpu_seconds"]:
        over.append("cpu_seconds with everything")
    print(f"\nGPT-3 175B on {full['ranks']} ranks: " + (f"over: {over}" if over else "in budget"))
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "budget": BUDGET,
        "hardware": hardware(),
        "results": results,
        "everything": everything,
        "by_kinds": by_kinds,
    }
    (options.out / "compile_time.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(results, options.out / "compile_time.png")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
