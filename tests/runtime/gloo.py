"""Runs rank graphs in real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, fx

from msc.ir.mesh import Mesh
from msc.runtime.process import Backend, ProcessExecutor

TIMEOUT = timedelta(seconds=60)
Programs = Callable[[int], fx.GraphModule]


def run_processes(
    mesh: Mesh,
    programs: Programs,
    inputs: Sequence[Sequence[Tensor]],
    folder: Path,
    backend: Backend = "aten",
    steps: int = 1,
) -> list[Any]:
    """Each rank's result of the last of `steps` runs; `programs` is a function of a module."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.save([list(own) for own in inputs], folder / "inputs.pt")
    mp.spawn(
        _rank, (mesh, programs, store.port, folder, backend, steps), nprocs=mesh.size, join=True
    )
    return [torch.load(folder / f"result_{rank}.pt") for rank in range(mesh.size)]


def _rank(
    rank: int, mesh: Mesh, programs: Programs, port: int, folder: Path, backend: Backend, steps: int
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.size, timeout=TIMEOUT)
    inputs = torch.load(folder / "inputs.pt")[rank]
    executor = ProcessExecutor(mesh, programs(rank), backend)
    for _ in range(steps):
        result = executor.run(inputs)
    torch.save(result, folder / f"result_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
