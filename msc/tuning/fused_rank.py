"""One rank that measures fused collectives: `python fused_rank.py FOLDER cpu|cuda`.

FOLDER has a graph of one call per file; rank 0 writes the seconds of all, of the slowest rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from msc.cost.measurements import APART, FUSED_WAY
from msc.ir.mesh import Mesh
from msc.ir.serialize import graphs_from_json
from msc.ranks import join
from msc.runtime.process import ProcessExecutor, ProcessRank
from msc.runtime.process_groups import ProcessGroups
from msc.runtime.shared_memory import SharedMemory
from msc.tuning.operands import operands
from msc.tuning.timing import ROUNDS, seconds_of

RESULTS = "results.json"
_TIMEOUT = timedelta(seconds=600)


def main() -> None:
    """Measure all calls of the folder."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    mesh = Mesh.parse(f"tp={os.environ['WORLD_SIZE']}")
    job = join(mesh, kind, _TIMEOUT)
    results = [
        measure(graphs_from_json(json.loads(file.read_text()))["call"], mesh, job.device)
        for file in sorted(folder.glob("[0-9]*.json"))
    ]
    if job.rank == 0:
        (folder / RESULTS).write_text(json.dumps(results))
    dist.barrier()
    job.close()


def measure(gm: fx.GraphModule, mesh: Mesh, device: torch.device) -> dict[str, float] | str:
    """Seconds of one call as one op, and as the collective and its GEMMs; or why not."""
    fused = ProcessExecutor(mesh, gm, timeout=_TIMEOUT)
    apart = ProcessExecutor(mesh, gm, timeout=_TIMEOUT, rank_of=_without_fusing)
    inputs = operands(list(gm.graph.find_nodes(op="placeholder")), device)
    ways = {FUSED_WAY: lambda: fused.run(inputs), APART: lambda: apart.run(inputs)}
    fused.run(inputs)
    if device.type == "cuda":
        (decision,) = fused.choice.decisions
        if not decision.kernels:
            return decision.reason
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        dist.barrier()
        for way, seconds in seconds_of(ways, device, rounds=1).items():
            found[way].append(seconds)
    return {way: _median_of_slowest(values, device) for way, values in found.items()}


def _median_of_slowest(values: list[float], device: torch.device) -> float:
    slowest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


def _without_fusing(
    mesh: Mesh,
    rank: int,
    groups: ProcessGroups,
    memories: Mapping[str, SharedMemory],
    before_update: Any = None,
    kernels: Any = None,
) -> ProcessRank:
    return ProcessRank(mesh, rank, groups, {}, before_update)


if __name__ == "__main__":
    main()
