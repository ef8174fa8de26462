"""The process executor over gloo equals the virtual executor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from msc.ir.mesh import Mesh
from msc.runtime.virtual import VirtualExecutor
from tests.runtime import programs
from tests.runtime.gloo import Job, run_processes

TP = Mesh.parse("tp=2")
PP = Mesh.parse("pp=2")


def tensors(*shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Inputs for two ranks."""
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        for _ in range(2)
    ]


@pytest.mark.gloo
def test_two_processes_equal_the_virtual_executor(tmp_path: Path) -> None:
    """Bit for bit: with two members a sum has one order. Inductor may contract, so it is near."""
    large = tensors((2, 40_000))  # beyond what is summed by exchange
    jobs = [
        Job(TP, programs.every_collective, tensors((4, 2))),
        Job(TP, programs.two_blocks, tensors((4, 8), (8, 8))),
        Job(PP, programs.exchange, tensors((2, 3), ())),
        Job(TP, programs.large_sum, large),
        Job(Mesh.parse("dp=1,tp=2"), programs.twin_groups, tensors((4,))),
        Job(TP, programs.two_blocks, tensors((4, 8), (8, 8)), "inductor"),
    ]
    for job, found in zip(jobs, run_processes(jobs, tmp_path), strict=True):
        expected = VirtualExecutor(job.mesh, job.programs).run(job.inputs)
        tolerance = 0.0 if job.backend == "aten" else 1e-12
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
