"""What each kind of overlap is worth: simulated at scale, and measured on processes.

    python benchmarks/overlap.py             # all of it; results/overlap.{json,png}
    python benchmarks/overlap.py --simulated | --measured

The steps of the ablation are those of MegaScale (Jiang et al., NSDI 2024, table 3), each on top of
the one before:

    none      a collective ends before anything else starts; receives are posted when needed
    tensor    collectives of tp beside independent work, within and across blocks, or fused
    pipeline  receives are posted a step early
    data      parameters arrive block by block, gradients leave as they are made

Simulated: GPT-3 175B on 256 and 12,288 GPUs, and a GPT of 7B on 64, on nodes of 8 A100. The *bound*
is the longest of a rank's computing and its busiest group; *hidden* is the part of the hideable
communication that is hidden (see `benchmarks/hideable.py`). Measured: a small GPT on 2 and 4
processes, whose transfers take the time of a modelled link and no processor
(`benchmarks/virtual_link.py`); rounds of all steps are interleaved.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/overlap.py`

import msc  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.hideable import SiteHiding, hiding  # noqa: E402
from benchmarks.models import GPT3_175B, GPTConfig, GPTWithLoss  # noqa: E402
from benchmarks.virtual_link import Board, VirtualLink  # noqa: E402
from msc.codegen.emit import emit  # noqa: E402
from msc.cost import Cluster  # noqa: E402
from msc.ir import actions  # noqa: E402
from msc.ir.communication import graphs_below, used_channels, used_groups  # noqa: E402
from msc.ir.groups import Group  # noqa: E402
from msc.program import Program  # noqa: E402
from msc.runtime.simulate.result import ClassResult  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SEVEN_BILLION = GPTConfig(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=51200)
TENSOR = ("overlap", "overlap-borders")
DATA = ("gather-late", "reduce-early")
ROUNDS = 25

Result = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step of the ablation: passes that are left out, and what else is."""

    name: str
    skipped: tuple[str, ...] = ()
    fuse: bool | str = "auto"
    receives_early: bool = True


STEPS = (
    Step("none", (*TENSOR, *DATA), fuse=False, receives_early=False),
    Step("tensor", DATA, receives_early=False),
    Step("pipeline", DATA),
    Step("data"),
)


@dataclass(frozen=True)
class Setting:
    """A model on a mesh; batch and micro_batch in sequences, micro_batch of one dp rank."""

    name: str
    model: GPTConfig
    mesh: str
    batch: int
    micro_batch: int
    cluster: Any = "a100"
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        """On each dp rank."""
        return self.batch // msc.Mesh.parse(self.mesh).axis_size("dp") // self.micro_batch

    def compile(self, step: Step, model: torch.nn.Module, device: str) -> Program:
        """The program with a step's passes."""
        shape = (self.batch, self.model.sequence)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        with _skipping(step.skipped):
            program = msc.compile(
                model,
                (tokens, tokens),
                mesh=self.mesh,
                microbatches=self.microbatches,
                optimizer=msc.AdamW(lr=1e-4),
                cluster=self.cluster,
                zero=1,
                fuse_collectives=step.fuse,
                **self.options,
            )
        if not step.receives_early:
            for graph in program.rank_graphs:
                receive_late(graph)
        return program


INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 6}
SIMULATED = (
    Setting("175B on 256", GPT3_175B, "pp=8,dp=4,tp=8", 256, 1, options=INTERLEAVED),
    Setting("175B on 12,288", GPT3_175B, "pp=8,dp=192,tp=8", 6144, 1, options=INTERLEAVED),
    Setting("7B on 64", SEVEN_BILLION, "dp=8,tp=8", 256, 4),
)

SMALL = GPTConfig(layers=4, hidden=128, heads=4, sequence=128, vocabulary=512)
LINK = Cluster(
    name="a core and a link of 300 MB/s",
    flops_per_s=7.5e10,
    memory_bytes_per_s=5e9,
    memory_bytes=8e9,
    devices_per_node=8,
    node_bytes_per_s=3e8,
    network_bytes_per_s=3e8,
    node_latency_s=1e-4,
    network_latency_s=1e-4,
    launch_s=2e-5,
)
MEASURED = tuple(
    Setting(mesh, SMALL, mesh, 16, size, LINK, torch.float32)
    for mesh, size in (("tp=2", 8), ("pp=2", 2), ("dp=2", 4), ("dp=2,tp=2", 4), ("pp=2,dp=2", 2))
)


@contextmanager
def _skipping(passes: Sequence[str]) -> Iterator[None]:
    os.environ["MSC_SKIP"] = ",".join(passes)
    try:
        yield
    finally:
        del os.environ["MSC_SKIP"]


def receive_late(graph: fx.GraphModule) -> None:
    """Post each receive right before it is waited for."""
    for node in graph.graph.find_nodes(op="call_function", target=actions.recv):
        (wait,) = node.users
        wait.prepend(node)


# -- simulated


def simulated(setting: Setting) -> list[Result]:
    """Every step of the ablation on the modelled cluster."""
    with torch.device("meta"):
        model = GPTWithLoss(setting.model).to(setting.dtype)
    rows: list[Result] = []
    for step in STEPS:
        program = setting.compile(step, model, "meta")
        result = program.simulate(setting.cluster)
        cluster = Cluster.load(setting.cluster)
        sites = {
            each.name: hiding(each, graph, cluster)
            for each, graph in zip(result.classes, program.rank_graphs, strict=True)
        }
        every = [site for found in sites.values() for site in found]
        hideable = sum(site.hideable for site in every)
        rows.append(
            {
                "step": step.name,
                "seconds": result.step_seconds,
                "mfu": result.mfu,
                "bubble": result.bubble,
                "exposed": {axis: result.exposed.get(axis, 0.0) for axis in ("tp", "pp", "dp")},
                "communication": sum(site.seconds for site in every) / len(sites),
                "hideable": hideable / len(sites),
                "hidden": sum(site.hidden for site in every) / hideable if hideable else 1.0,
                "bound": max(map(_bound, result.classes)),
                "rest": _rest(every, len(sites)),
            }
        )
        print(_line(setting.name, rows[-1]), flush=True)
    for text in rows[-1]["rest"]:
        print(f"    {text}")
    return rows


def _bound(rank: ClassResult) -> float:
    """Seconds of a rank's computing, or of its busiest group or channel."""
    busy: dict[str, float] = {}
    for transfer in rank.transfers:
        busy[transfer.name] = busy.get(transfer.name, 0.0) + transfer.end - transfer.begin
    return max([rank.compute_seconds, *busy.values()])


def _rest(sites: Sequence[SiteHiding], ranks: int) -> list[str]:
    """What is left exposed, the largest first, with the reason."""
    found: dict[tuple[str, ...], list[SiteHiding]] = {}
    for site in sites:
        found.setdefault((*site.site, site.reason), []).append(site)
    lines = []
    for (axis, kind, module, reason), each in found.items():
        exposed = sum(site.exposed for site in each) / ranks
        whole = sum(site.seconds for site in each) / ranks
        if exposed > 0.02 * whole and exposed > 1e-4:
            where = f" of {module}" if module else ""
            text = f"{axis} {kind}{where}: {exposed:.3f} s of {whole:.3f} s exposed: {reason}"
            lines.append((exposed, text))
    return [text for _, text in sorted(lines, reverse=True)]


def _line(name: str, row: Result) -> str:
    exposed = "".join(f"{row['exposed'][axis]:>9.3f}" for axis in ("tp", "pp", "dp"))
    return (
        f"{name:16}{row['step']:10}{row['seconds']:>9.3f}{row['mfu']:>8.1%}{row['bubble']:>8.1%}"
        f"{exposed}{row['hidden']:>9.1%}{row['bound']:>9.3f}"
    )


SIMULATED_HEAD = (
    f"{'':16}{'':10}{'step s':>9}{'MFU':>8}{'bubble':>8}{'tp':>9}{'pp':>9}{'dp':>9}"
    f"{'hidden':>9}{'bound s':>9}    (exposed seconds by axis)"
)


# -- measured


def measured(setting: Setting) -> list[Result]:
    """Every step of the ablation on processes with a virtual link, beside the simulated time."""
    torch.manual_seed(0)
    model = GPTWithLoss(setting.model)
    mesh = msc.Mesh.parse(setting.mesh)
    with tempfile.TemporaryDirectory() as folder:
        expected, boards = [], []
        for step in STEPS:
            program = setting.compile(step, model, "cpu")
            program.save(Path(folder) / step.name)
            expected.append(program.simulate(LINK).step_seconds)
            boards.append(_board(program))
        arguments = (setting.batch, Path(folder), boards)
        spawn(_rank, arguments, nprocs=mesh.size)  # type: ignore[no-untyped-call]
        by_rank = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(mesh.size)]
    rows = []
    for index, step in enumerate(STEPS):
        rounds = [max(times[index][r] for times in by_rank) for r in range(1, ROUNDS)]
        rows.append(
            {
                "step": step.name,
                "seconds": statistics.median(rounds),
                "least": min(rounds),
                "spread": statistics.stdev(rounds),
                "simulated": expected[index],
            }
        )
    for row in rows:
        print(
            f"{setting.name:16}{row['step']:10}{1e3 * row['seconds']:>10.1f}"
            f"{1e3 * row['least']:>10.1f}{1e3 * row['spread']:>10.1f}"
            f"{row['seconds'] / rows[0]['seconds']:>10.3f}{1e3 * row['simulated']:>12.1f}"
            f"{row['simulated'] / rows[0]['simulated']:>10.3f}",
            flush=True,
        )
    return rows


MEASURED_HEAD = (
    f"{'':16}{'':10}{'median ms':>10}{'least':>10}{'spread':>10}{'/ none':>10}"
    f"{'simulated ms':>12}{'/ none':>10}"
)


def _board(program: Program) -> Board:
    """A board with a line for every group and channel of all ranks."""
    mesh = program.mesh
    names: dict[str, None] = {}
    operations: int = 0
    for rank in range(mesh.size):
        graph = program.rank_graph(rank)
        for name in used_groups(graph):
            names[f"{name} {Group.parse(name).members(mesh, rank)}"] = None
        for channel, stage in used_channels(graph):
            peer = mesh.rank({**mesh.coordinate(rank), "pp": stage})
            names[f"{channel} {tuple(sorted((rank, peer)))}"] = None
        operations = max(operations, _operations(graph))
    return Board.of(list(names), mesh.size, ROUNDS * operations)


def _operations(graph: fx.GraphModule) -> int:
    """At least as many as a step starts on one group or channel."""
    calls = len(graph.graph.find_nodes(op="call_module"))
    inside = sum(len(list(each.graph.nodes)) for each in graphs_below(graph))
    return (1 + calls) * inside


def _rank(rank: int, batch: int, folder: Path, boards: Sequence[Board]) -> None:
    """One process: rounds of all steps in turn; writes seconds by step and round."""
    torch.set_num_threads(1)
    jobs = []
    for step, board in zip(STEPS, boards, strict=True):
        program = msc.load(folder / step.name, rank)
        graph = program.rank_graph(rank)
        if not step.receives_early:
            receive_late(graph)
        link = VirtualLink(program.mesh, rank, LINK, board)
        run = emit(graph, "process").program
        tokens = torch.zeros((batch, SMALL.sequence), dtype=torch.int64)
        state = program.initial_state(rank)
        given = state.arguments(graph, program.local_inputs((tokens, tokens), rank))
        jobs.append((link, run, given))
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(ROUNDS):
        for found, (link, run, given) in zip(times, jobs, strict=True):
            start = time.monotonic()
            with torch.no_grad():
                run(link, list(given))
            found.append(time.monotonic() - start)
    (folder / f"{rank}.json").write_text(json.dumps(times))


# -- all of it


def draw(facts: Result, file: Path) -> None:
    """Step times relative to the first step; nothing where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, ("simulated", "measured"), strict=True):
        for name, rows in facts[kind].items():
            first = rows[0]["seconds"]
            axes.plot(
                [row["step"] for row in rows],
                [row["seconds"] / first for row in rows],
                marker="o",
                label=name,
            )
        axes.set_title(kind)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("step time, first step = 1")
    figure.savefig(file, dpi=120)


def main() -> int:
    """Simulate, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--simulated", action="store_true", help="only what is simulated")
    parser.add_argument("--measured", action="store_true", help="only what is measured")
    options = parser.parse_args()
    both = options.simulated == options.measured
    file = RESULTS / "overlap.json"
    facts: Result = json.loads(file.read_text()) if file.exists() else {}
    facts["hardware"] = hardware()
    if both or options.simulated:
        print(SIMULATED_HEAD)
        facts["simulated"] = {setting.name: simulated(setting) for setting in SIMULATED}
    if both or options.measured:
        print(MEASURED_HEAD)
        facts["link"] = dataclasses.asdict(LINK)
        facts["measured"] = {setting.name: measured(setting) for setting in MEASURED}
    file.write_text(json.dumps(facts, indent=1) + "\n")
    if {"simulated", "measured"} <= facts.keys():
        draw(facts, RESULTS / "overlap.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
