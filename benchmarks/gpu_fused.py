"""Programs with fused collectives for `gpu_check`: all ranks of a mesh on one device, and what one
process can try of the memory that processes share."""

from __future__ import annotations

import copy
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

import msc
from benchmarks.gpu_cases import Case, Make, Sizes
from benchmarks.gpu_programs import joined
from benchmarks.models import GPTConfig, GPTWithLoss
from msc.ir.torch_private import symmetric_memory
from msc.runtime.fused_kernels import stream_memory

LARGE = GPTConfig(layers=2, hidden=1024, heads=8, sequence=512, vocabulary=4096)
TINY = GPTConfig(layers=1, hidden=32, heads=2, sequence=8, vocabulary=96)


def fused_program_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """A step of all ranks in float32, and flags and memory between two streams."""
    if dtype != torch.float32:
        return
    tiny = sizes.hidden < 1024
    yield _virtual_step(make, TINY if tiny else LARGE, "tp=2" if tiny else "dp=2,tp=4")
    if make.device == "cuda":
        yield _shared_memory(make)


def _virtual_step(make: Make, config: GPTConfig, mesh: str) -> Case:
    torch.manual_seed(0)
    model = GPTWithLoss(config)
    tokens = make.integers(config.vocabulary, 4, config.sequence).cpu()
    program = msc.compile(
        model, (tokens, tokens), mesh=mesh, precision="float32", fuse_collectives=True
    )
    names = list(program.parameters)
    said: list[str] = []

    def step() -> Tensor:
        state = [program.initial_state(rank) for rank in range(program.mesh.size)]
        for each in state:
            for values in (each.parameters, each.buffers):
                values.update({name: value.to(make.device) for name, value in values.items()})
        placed = tokens.to(make.device)
        with _kernels(make.device), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            result = program.run_virtual((placed, placed), state)
        said.extend(str(each.message) for each in caught if each.category is RuntimeWarning)
        return joined([result.loss, *(result.grads[name] for name in names)])

    def eager() -> Tensor:
        with torch.enable_grad():
            reference = copy.deepcopy(model).double()
            loss = reference(tokens, tokens)
            loss.backward()
        grads = dict(reference.named_parameters())
        return joined([loss.detach(), *(grads[name].grad for name in names)])

    count = len(program.report.fused_collectives)
    return Case(
        f"fused collectives, {mesh} on one device",
        step,
        eager,
        None,
        program.report.model_flops,
        "TFLOP/s",
        torch.float32,
        note=lambda: "; ".join(dict.fromkeys(said)) or f"{count} places, no kernel given up",
    )


@contextmanager
def _kernels(device: str) -> Iterator[None]:
    """On the CPU kernels are interpreted."""
    before = os.environ.get("MSC_TRITON", "")
    os.environ["MSC_TRITON"] = "interpret" if device == "cpu" else before
    try:
        yield
    finally:
        os.environ["MSC_TRITON"] = before


def _shared_memory(make: Make) -> Case:
    """A stream copies out of symmetric memory when another has written it and raised a flag."""
    size = 2**20
    source = make.normal(size, dtype=torch.float32)
    if not dist.is_initialized():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    whole = dist.group.WORLD
    assert whole is not None
    (memory,) = symmetric_memory(8 * size, torch.device("cuda", 0), whole)
    flags, values = memory[:256].view(torch.int32), memory[4 * size :].view(torch.float32)
    writer, reader = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    calls = [0]

    def run() -> Tensor:
        calls[0] += 1
        current = torch.cuda.current_stream()
        for stream in (writer, reader):
            stream.wait_stream(current)
        found = torch.zeros_like(source)
        with torch.cuda.stream(writer):
            values.copy_(source)
            stream_memory.write(flags, 0, calls[0])
        with torch.cuda.stream(reader):
            stream_memory.wait(flags, 0, calls[0])
            found.copy_(values)
        for stream in (writer, reader):
            current.wait_stream(stream)
        return found

    name = "symmetric memory and stream flags"
    return Case(name, run, source.double, None, 4.0 * size, "GB/s", torch.float32, exact=True)
