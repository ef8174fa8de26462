"""Predicted peak memory against storages counted while the program runs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import msc
from msc.ir.ops import linear_loss
from msc.program import Program
from msc.runtime.memory.meter import StorageMeter
from msc.runtime.process import ProcessExecutor
from tests.models import GPT, Llama, tokens

LENGTH = 32
BATCH = tokens(samples=4, length=LENGTH)
TOLERANCE = 0.03
"""Of activations: of all that a step takes beyond parameters, moments and inputs."""


def gpt(layers: int = 2, **options: Any) -> Program:
    model = GPT(layers=layers, length=LENGTH, dropout=0.1)
    return msc.compile(model, BATCH, **{"mesh": "", **options})


def llama(**options: Any) -> Program:
    return msc.compile(Llama(layers=2, length=LENGTH), BATCH, **{"mesh": "", **options})


def arguments(program: Program, rank: int) -> list[torch.Tensor]:
    state = program.initial_state(rank)
    return list(state.arguments(program.rank_graph(rank), program.local_inputs(BATCH, rank)))


def activations(program: Program, rank: int, held: int) -> int:
    return program.memory_bytes()[program.class_of(rank)] - held


def test_the_meter_counts_storages_as_long_as_something_holds_them() -> None:
    x = torch.zeros(1000)
    with StorageMeter([x]) as meter:
        y = x + 1
        row = y.view(10, 100)[0]
        del y
        assert meter.live == 8000
        del row
        assert meter.live == 4000
        x.view(10, 100)
    assert (meter.live, meter.peak) == (4000, 8000)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_rank(recompute: str) -> None:
    check_one_rank(gpt(recompute=recompute, microbatches=2))


def test_one_rank_with_an_optimizer_in_mixed_precision() -> None:
    check_one_rank(llama(optimizer=msc.AdamW(max_norm=1.0), precision="bf16-mixed"))


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
def test_a_head_that_is_one_op_with_its_loss(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Logits and their gradient are most of what a small model needs, and are never there."""
    monkeypatch.setattr(linear_loss, "CPU_LOGITS_BYTES", 1 << 16)
    batch = tokens(samples=4, length=LENGTH)
    needed = []
    for fuse_loss in (False, True):
        model = GPT(vocabulary=4096, width=16, heads=2, layers=1, length=LENGTH)
        program = msc.compile(model, batch, fuse_loss=fuse_loss, precision=precision)
        check_one_rank(program)
        needed.append(program.memory_bytes()[0])
    logits = 4 * LENGTH * 4096 * (2 if precision == "bf16-mixed" else 4)
    assert needed[0] - needed[1] > 1.5 * logits


def check_one_rank(program: Program) -> None:
    given = arguments(program, 0)
    held = sum(value.nbytes for value in given)
    with StorageMeter(given) as meter:
        program.virtual_runs.executor(torch.device("cpu")).run([given])
    assert activations(program, 0, held) == pytest.approx(meter.peak - held, rel=TOLERANCE)


def test_two_processes(tmp_path: Path) -> None:
    programs = [
        gpt(mesh="tp=2", recompute="selective", optimizer=msc.AdamW()),
        gpt(mesh="pp=2", recompute="none", microbatches=2),
        llama(mesh="dp=2", recompute="full", microbatches=2),
        gpt(4, mesh="pp=2", schedule="interleaved", recompute="full", microbatches=4),
        gpt(mesh="pp=2", schedule="zb-h1", recompute="selective", microbatches=4),
        gpt(mesh="tp=2", fuse_loss=True),
        gpt(mesh="pp=2", schedule="zb-h1", fuse_loss=True, microbatches=4),
        *(gpt(mesh="dp=2", zero=z, microbatches=2, optimizer=msc.AdamW()) for z in (1, 2, 3)),
    ]
    for number, program in enumerate(programs):
        program.save(tmp_path / str(number))
    spawn(measure, (len(programs), tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        for program, (peak, held) in zip(
            programs, torch.load(tmp_path / f"{rank}.pt"), strict=True
        ):
            predicted = activations(program, rank, held)
            assert predicted == pytest.approx(peak - held, rel=TOLERANCE), (program.mesh, rank)


def measure(rank: int, count: int, folder: Path) -> None:
    """One of two processes: the peak of each saved program, and what it was given."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    found = []
    for number in range(count):
        program = msc.load(folder / str(number), rank)
        executor = ProcessExecutor(program.mesh, program.rank_graph(rank))
        given = arguments(program, rank)
        held = sum(value.nbytes for value in given)
        with StorageMeter(given) as meter:
            executor.run(given)
        found.append((meter.peak, held))
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
