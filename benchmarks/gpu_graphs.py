"""Loss and gradients of a model in a CUDA graph, for `gpu_check`: what launching kernels costs.

The optimizer is left out: it copies tables of addresses from the host in each step, which a graph
cannot hold. Where capturing is not legal for another reason, the plain step is timed and the reason
told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import msc
from benchmarks.gpu_cases import Case, Make, Sizes
from benchmarks.gpu_programs import ONE_BILLION, SMALL
from benchmarks.models import GPTConfig, GPTWithLoss
from msc.codegen.devices import on_device
from msc.codegen.kernel_calls.choice import choose
from msc.runtime.virtual import VirtualExecutor

BATCH = 4
_WARM = 3  # runs that compile kernels and fill caches, which capturing must not


def graph_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """One rank's forward and backward, replayed; `ratio` is over the same ops launched one by one.

    Eager ops and kernels are the same, so below 1 it is launches that are saved.
    """
    if dtype == torch.bfloat16:
        yield _case(make, SMALL if sizes.hidden < 1024 else ONE_BILLION)


def _case(make: Make, config: GPTConfig) -> Case:
    torch.manual_seed(0)
    tokens = make.integers(config.vocabulary, BATCH, config.sequence).cpu()
    program = msc.compile(GPTWithLoss(config), (tokens, tokens), precision="bf16-mixed")
    step = _step(program, (tokens, tokens), torch.device(make.device))
    replay, why = (step, "the CPU has none") if make.device == "cpu" else _captured(step)
    return Case(
        "loss and gradients in a CUDA graph" if not why else "loss and gradients",
        replay,
        step,
        step if make.device == "cuda" else None,
        program.report.model_flops,
        "TFLOP/s",
        torch.bfloat16,
        note=lambda: f"no CUDA graph: {why}" if why else "",
    )


def _step(
    program: msc.program.Program, batch: Any, device: torch.device
) -> Callable[[], list[Tensor]]:
    """Runs the program of one rank on the device."""
    graph = program.rank_graph(0)
    given = program.initial_state(0).arguments(graph, program.local_inputs(batch, 0))
    placed = [value.to(device) for value in given]
    local = graph if device.type == "cpu" else on_device(graph, device)
    choice = choose(device, [local], shared=True)
    executor = VirtualExecutor(program.mesh, lambda rank: local, choice=choice)

    def step() -> list[Tensor]:
        (found,) = executor.run([placed])
        return [found["loss"], *(each for each in found["gradients"] if each is not None)]

    return step


def _captured(step: Callable[[], list[Tensor]]) -> tuple[Callable[[], list[Tensor]], str]:
    """The step in a CUDA graph; or the step itself, and why not."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = step()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return step, str(error).splitlines()[0]

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay, ""
