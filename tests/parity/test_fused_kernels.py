"""Whole models with fused collectives in kernels, all ranks at once in the interpreter."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import msc
from msc.codegen.kernel_calls import call
from msc.codegen.kernels import gemm_scatter
from msc.codegen.kernels.description import Kernel
from msc.ir.communication import fused_nodes
from msc.runtime.fused_kernels.arena import layout_of
from msc.runtime.memory.predict import MemoryPredictor
from msc.testing.interpreter.executor import Executor
from msc.verification import relative_error
from tests import models

ENTRIES = {"gather_gemm", "gather_weight_gradient", "gemm_scatter", "scatter_sum"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels of several ranks that ran, in order."""
    monkeypatch.setenv("MSC_TRITON", "interpret")
    found: list[Kernel] = []
    real = Executor.launch

    def launch(self: Executor, rank: int, kernel: Kernel, values: Mapping[str, Any]) -> Any:
        found.append(kernel)
        return real(self, rank, kernel, values)

    monkeypatch.setattr(Executor, "launch", launch)
    return found


def gpt(heads: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return models.GPT(layers=1, heads=heads, width=16 * heads, length=8)


def ids(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, 96, (2, samples, 8), generator=generator)
    targets[0, :3] = models.IGNORED
    return {"ids": ids, "targets": targets}


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (4, 2, {"mesh": "tp=4"}),
    (2, 4, {"mesh": "dp=2,tp=2", "microbatches": 2}),
    (2, 2, {"mesh": "tp=2", "rewrites": [msc.ParallelBlock()]}),
]


@pytest.mark.parametrize(("heads", "samples", "options"), CASES)
def test_a_gpt(launched: list[Kernel], heads: int, samples: int, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing may fall back
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        if "rewrites" in options:
            warnings.filterwarnings("ignore", "(?s).* this LayerNorm has none$")
        report = msc.verify(
            gpt(heads), ids(samples), dtype=torch.float32, fuse_collectives=True, **options
        )
    assert report.ok, report.first_difference
    assert report.max_error <= 1e-5
    assert {kernel.entry for kernel in launched} == ENTRIES
    if "rewrites" in options:  # attention and MLP read one gather, and their sum is scattered
        names = {kernel.name.split("_tp2")[0] for kernel in launched}
        assert "gemm_scatter_nk_residual" in names
        assert any(kernel.name.endswith("x32_to_64_16_fp32") for kernel in launched)


def test_steps_that_follow_each_other(
    launched: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags count on from step to step: parameters behind three steps are those of ATen."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    batch = (torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0)),)
    options: dict[str, Any] = {"loss_fn": loss, "optimizer": msc.AdamW()}
    found = {}
    for flag in ("interpret", "off"):
        monkeypatch.setenv("MSC_TRITON", flag)
        program = msc.compile(
            model, batch, mesh="tp=2", microbatches=2, fuse_collectives=True, **options
        )
        state = None
        for _ in range(3):
            result = program.run_virtual(batch, state)
            state = result.state
        found[flag] = result.params
    assert len(launched) >= 2 * 2 * 3
    for name, expected in found["off"].items():
        assert relative_error(found["interpret"][name], expected, 0.0) <= 1e-5, name


def small() -> msc.Program:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    options: dict[str, Any] = {"mesh": "tp=2", "loss_fn": loss, "fuse_collectives": True}
    return msc.compile(model, (torch.randn(4, 8, 16),), precision="float32", **options)


def fused(program: msc.Program) -> list[fx.Node]:
    return [node for gm in program.rank_graphs for node in fused_nodes(gm)]


def test_what_ranks_share_is_in_the_predicted_memory(launched: list[Kernel]) -> None:
    program = small()
    graph = program.rank_graph(0)
    choice = program.kernels()
    shared = layout_of(choice.fused_over("tp")).total
    assert shared > 0
    kernels, plain = MemoryPredictor(choice), MemoryPredictor()
    assert shared < kernels.bytes(graph) <= plain.bytes(graph) + shared


def test_a_kernel_that_does_not_compile_is_given_up(
    launched: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks, for that call: the gather beside it stays in its kernels."""
    real = gemm_scatter.emit

    def broken(scatter: gemm_scatter.GemmScatter) -> Kernel:
        kernel = real(scatter)
        return dataclasses.replace(kernel, source=f"raise RuntimeError('x')\n{kernel.source}")

    monkeypatch.setattr(gemm_scatter, "emit", broken)
    monkeypatch.setattr(call, "_warned", set())
    program, batch = small(), (torch.randn(4, 8, 16),)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        found = [program.run_virtual(batch).grads for _ in range(2)]
    (said,) = [str(each.message) for each in caught if "on all ranks" in str(each.message)]
    assert said.startswith("msc.matmul_reduce_scatter in 2 runs without its Triton kernel on all")
    assert {kernel.entry for kernel in launched} == {"gather_gemm", "gather_weight_gradient"}
    (line,) = [line for line in program.kernels().lines if "matmul_reduce_scatter" in line]
    assert ": ATen: gemm_scatter_nk" in line
    monkeypatch.setenv("MSC_TRITON", "off")
    expected = program.run_virtual(batch).grads
    for grads in found:
        torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)


def test_without_coroutines_they_run_unfused(
    launched: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "greenlet" else real(name)
    )
    program = small()
    with pytest.warns(RuntimeWarning, match="coroutines of greenlet, which is not installed"):
        lines = program.kernels().lines
    assert sum("in coroutines of greenlet" in line for line in lines) == len(fused(program))
    program.run_virtual((torch.randn(4, 8, 16),))
    assert launched == []
