"""Runs rank graphs in real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.multiprocessing.spawn import spawn

from msc.ir.mesh import Mesh
from msc.runtime.process import Backend, ProcessExecutor

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Job:
    """One program for all ranks, with each rank's inputs; `programs` is a function of a module."""

    mesh: Mesh
    programs: Callable[[int], fx.GraphModule]
    inputs: Sequence[Sequence[Tensor]]
    backend: Backend = "aten"


def run_processes(jobs: Sequence[Job], folder: Path) -> list[list[Any]]:
    """For each job, each rank's result; one set of processes runs all jobs."""
    size = jobs[0].mesh.size
    spawn(_rank, (list(jobs), folder), nprocs=size)  # type: ignore[no-untyped-call]
    results = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
    return [[own[index] for own in results] for index in range(len(jobs))]


def _rank(rank: int, jobs: Sequence[Job], folder: Path) -> None:
    torch.set_num_threads(1)
    size = jobs[0].mesh.size
    meeting = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=TIMEOUT
    )
    results = []
    for job in jobs:
        executor = ProcessExecutor(job.mesh, job.programs(rank), job.backend)
        results.append(executor.run(job.inputs[rank]))
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
