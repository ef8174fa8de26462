"""Fused collectives of real processes: in shared memory, and without it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from msc.ir.errors import CommunicationError
from msc.ir.mesh import Mesh
from msc.runtime import process, shared_memory
from msc.runtime.process import ProcessExecutor
from msc.runtime.virtual import VirtualExecutor
from tests.runtime import programs

MESH = Mesh.parse("tp=2")
TIMEOUT = timedelta(seconds=60)


def inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(2, 3, 8), (6, 8), (8, 5), (6,), (2, 6, 3)]
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


@pytest.mark.gloo
def test_processes_equal_the_virtual_executor(tmp_path: Path) -> None:
    spawn(_rank, (tmp_path,), nprocs=2)  # type: ignore[no-untyped-call]
    expected = VirtualExecutor(MESH, programs.fused).run([inputs(0), inputs(1)])
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        # without shared memory the same ops run in the same order as on the virtual executor
        torch.testing.assert_close(found["unfused"], expected[rank], rtol=0, atol=0)
        for step in found["steps"]:
            torch.testing.assert_close(step, expected[rank], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(step, found["steps"][0], rtol=0, atol=0)
        assert found["unnamed"], "the file of the shared memory must not stay behind"
    late, dead = torch.load(tmp_path / "0.pt")["errors"]
    for error in (late, dead):
        assert error.startswith("rank 0 waits for rank 1 in all_gather_matmul at %")
        assert "(layers.0), call 1" in error
        assert "of the shared memory of group 'tp' (0, 1), but rank 1 " in error
    assert "rank 1 gave nothing for 0.1 s, after its call 9. Look at its output" in late
    assert "rank 1 has ended, after its call 9." in dead


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=TIMEOUT)
    graph = programs.fused(rank)
    executor = ProcessExecutor(MESH, graph, timeout=TIMEOUT)
    found: dict[str, Any] = {"steps": [executor.run(inputs(rank)) for _ in range(3)]}
    lines = Path("/proc/self/maps").read_text().splitlines()
    found["unnamed"] = all("(deleted)" in line for line in lines if "/msc-" in line)
    with pytest.MonkeyPatch.context() as patch:  # as if the ranks were on two hosts
        patch.setattr(process, "share", lambda *_: None)
        found["unfused"] = ProcessExecutor(MESH, graph, timeout=TIMEOUT).run(inputs(rank))
    torch.save(found, folder / f"{rank}.pt")
    if rank == 0:
        (memory,) = executor.memories.values()
        found["errors"] = []
        for timeout_s in (0.1, 60.0):
            memory.timeout_s = timeout_s
            with pytest.raises(CommunicationError) as error:
                executor.run(inputs(rank))
            found["errors"].append(str(error.value))
            if timeout_s < 1:
                dist.barrier()  # the other one goes on, and ends without a call
        torch.save(found, folder / f"{rank}.pt")
    else:
        dist.barrier()
        os._exit(0)
    dist.destroy_process_group()


def test_a_file_of_another_host_is_not_taken(tmp_path: Path) -> None:
    path, token, problem = shared_memory.make_file(4096)
    try:
        assert not problem
        opened = shared_memory.open_file(path, token, 4096)
        assert opened is not None
        assert len(opened[1]) == 4096
        os.close(opened[0])
        assert shared_memory.open_file(path, os.urandom(16), 4096) is None
        assert shared_memory.open_file(str(tmp_path / "none"), token, 4096) is None
    finally:
        os.unlink(path)


def test_too_little_memory_is_a_problem_at_once() -> None:
    path, _, problem = shared_memory.make_file(1 << 60)
    assert problem
    assert not os.path.exists(path)
