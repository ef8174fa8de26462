"""Whole steps for `gpu_check`: a model of 1B beside torch.compile, and eight virtual ranks.

The large one runs as a user's would: `msc.compile` in "bf16-mixed", one rank of the process
executor, AdamW in the program. Its rival is the same model under `torch.compile` and autocast with
torch's fused AdamW. The small one runs all ranks of a mesh in one process on the device, against
eager PyTorch in float64.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import msc
from benchmarks.gpu_cases import Case, Make, Sizes
from benchmarks.models import GPTConfig, GPTWithLoss
from msc.cost import Cluster
from msc.program import Program
from msc.trainer import Trainer

ONE_BILLION = GPTConfig(layers=20, hidden=2048, heads=16, sequence=2048, vocabulary=32768)
BATCH = 4
SMALL = GPTConfig(layers=4, hidden=64, heads=4, sequence=32, vocabulary=96)
SMALL_MESH = "pp=2,dp=2,tp=2"
PEAK = Cluster.load("h100").peak(torch.bfloat16)  # an H200 has the same


def program_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """The large step in bfloat16, the small one in float64."""
    tiny = sizes.hidden < 1024
    if dtype == torch.bfloat16:
        yield from _large_step(make, SMALL if tiny else ONE_BILLION)
    else:
        yield _virtual_step(make)


def _large_step(make: Make, config: GPTConfig) -> Iterator[Case]:
    torch.manual_seed(0)
    model = GPTWithLoss(config)
    tokens = make.integers(config.vocabulary, BATCH, config.sequence)
    batch = (tokens.cpu(), tokens.cpu())
    program = msc.compile(
        model, batch, precision="bf16-mixed", optimizer=msc.AdamW(lr=1e-4, weight_decay=0.0)
    )
    rival = _eager_step(copy.deepcopy(model).to(make.device), tokens)

    def first_loss() -> Tensor:
        """Of the untrained model in eager PyTorch."""
        with torch.no_grad():
            loss: Tensor = copy.deepcopy(model).to(make.device)(tokens, tokens)
        return loss.cpu().double()

    with Trainer(program, itertools.repeat(batch), log=False, device=make.device) as trainer:

        def step() -> Tensor:
            trainer.fit(1)
            return torch.tensor(trainer.losses[0], dtype=torch.float64)

        yield Case(
            f"training step, {sum(p.numel() for p in model.parameters()) / 1e9:.2f}B",
            step,
            first_loss,
            rival,
            program.report.model_flops,
            "TFLOP/s",
            torch.bfloat16,
            note=lambda: _note(program, step, make.device),
        )


def _eager_step(model: torch.nn.Module, tokens: Tensor) -> Callable[[], Any]:
    """A step under torch.compile, autocast and a fused optimizer."""
    device = tokens.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    # on the CPU the script is tested, not the compiler
    compiled = torch.compile(model) if device == "cuda" else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad(), torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens, tokens)
        loss.backward()
        optimizer.step()
        return float(loss.detach())  # as the trainer does after each step

    return step


def _note(program: Program, step: Callable[[], Any], device: str) -> str:
    """How busy the device is in a step, its MFU, and which ops are not deterministic."""
    found = [_nondeterministic(step)]
    if device == "cuda":
        busy, span = _busy_seconds(step)
        mfu = program.report.model_flops / span / PEAK
        found.append(f"MFU {mfu:.1%} of {PEAK / 1e12:.0f} TFLOP/s")
        found.append(f"idle between kernels {1 - busy / span:.1%}")
    return "; ".join(found)


def _nondeterministic(step: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            step()
        finally:
            torch.use_deterministic_algorithms(False)
    texts = {str(each.message).split(" does not have")[0] for each in caught}
    named = sorted(text for text in texts if "\n" not in text and len(text) < 80)
    return (
        "no op without a deterministic kernel"
        if not named
        else "not deterministic: " + ", ".join(named)
    )


def _busy_seconds(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds in which a kernel runs, and from the first one's start to the last one's end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6, (reached - spans[0][0]) / 1e6


def joined(values: Sequence[Tensor | None]) -> Tensor:
    """All in one vector: a gradient that is zero but for rounding has no scale of its own."""
    return torch.cat([value.flatten().cpu() for value in values if value is not None])


def _virtual_step(make: Make) -> Case:
    torch.manual_seed(0)
    model = GPTWithLoss(SMALL)
    tokens = make.integers(SMALL.vocabulary, 8, SMALL.sequence).cpu()
    program = msc.compile(
        model, (tokens, tokens), mesh=SMALL_MESH, microbatches=2, precision="float64"
    )
    names = list(program.parameters)

    def step() -> Tensor:
        state = [program.initial_state(rank) for rank in range(program.mesh.size)]
        for each in state:
            for values in (each.parameters, each.buffers):
                values.update({name: value.to(make.device) for name, value in values.items()})
        placed = tokens.to(make.device)
        result = program.run_virtual((placed, placed), state)
        return joined([result.loss, *(result.grads[name] for name in names)])

    def eager() -> Tensor:
        with torch.enable_grad():
            reference = copy.deepcopy(model).double()
            loss = reference(tokens, tokens)
            loss.backward()
        grads = dict(reference.named_parameters())
        return joined([loss.detach(), *(grads[name].grad for name in names)])

    work = program.report.model_flops
    name = f"virtual ranks, {SMALL_MESH}"
    return Case(name, step, eager, None, work, "TFLOP/s", torch.float64)
