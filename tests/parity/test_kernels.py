"""Whole models in Triton kernels, in the interpreter, against one device in ATen's ops."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import msc
from msc.codegen.kernel_calls import call
from msc.codegen.kernels import launch as launching
from msc.codegen.kernels.description import Kernel
from msc.runtime.memory.meter import StorageMeter
from msc.runtime.memory.predict import MemoryPredictor
from msc.verification import relative_error
from tests import models, zoo


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that ran, of programs that have no op in ATen that could have one."""
    monkeypatch.setenv("MSC_TRITON", "interpret")
    found: set[str] = set()
    real = launching.launch

    def launch(kernel: Kernel, values: Mapping[str, Any]) -> None:
        found.add(kernel.entry)
        real(kernel, values)

    monkeypatch.setattr(call, "launch", launch)
    return found


def gpt(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return models.GPT(layers=2, heads=2, width=32, length=8, dropout=dropout)


def mistral() -> nn.Module:
    """RMSNorm, grouped heads, a sliding window, rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**zoo.LLAMA, **zoo.GROUPED, "head_dim": 16, "num_hidden_layers": 2}
    config = transformers.MistralConfig(**sizes, sliding_window=4)
    model: nn.Module = transformers.MistralForCausalLM(config)
    return model.train()


def ids(samples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, 96, (2, samples, 8), generator=generator)
    targets[0, :3] = models.IGNORED
    return {"ids": ids, "targets": targets}


def checked(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing may fall back
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        report = msc.verify(model, batch, dtype=torch.float32, **options)
    assert report.ok, report.first_difference
    assert report.max_error <= 1e-5


GPT_KERNELS = {
    "gemm", "attention_forward", "attention_delta", "attention_backward_keys",
    "attention_backward_queries", "norm_forward", "norm_backward", "column_sums",
    "cross_entropy_terms", "cross_entropy_gradient",
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2"])
def test_a_gpt(entries: set[str], mesh: str) -> None:
    checked(gpt(), ids(2), mesh=mesh)
    assert entries == GPT_KERNELS


def test_a_gpt_whose_head_is_one_op_with_its_loss(entries: set[str]) -> None:
    checked(gpt(), ids(2), mesh="tp=2", fuse_loss=True)
    head = {f"linear_cross_entropy_{part}" for part in ("terms", "combine", "gradient")}
    assert entries == {name for name in GPT_KERNELS if not name.startswith("cross")} | head


def test_a_gpt_with_dropout(entries: set[str]) -> None:
    checked(gpt(0.1), ids(2), mesh="tp=2")
    assert "dropout" in entries


def test_a_llama_with_grouped_heads_and_a_sliding_window(entries: set[str]) -> None:
    batch = {name: value[:2] for name, value in zoo.batch("mistral").items()}
    program = msc.compile(mistral(), batch, mesh="tp=2", precision="float32")
    names = {kernel.name for kernel in program.kernels("interpreter").sources}
    assert any(name.startswith("attention_forward_causal_window4_2x8x2g1x16") for name in names)
    assert any(name.startswith("norm_backward_rms") for name in names)
    checked(mistral(), batch, mesh="tp=2")
    assert entries == GPT_KERNELS | {"gate_backward"}


@pytest.mark.parametrize("optimizer", [msc.AdamW(max_norm=1.0), msc.LAMB(max_norm=0.01)])
def test_a_step(
    entries: set[str], monkeypatch: pytest.MonkeyPatch, optimizer: msc.AdamW | msc.LAMB
) -> None:
    """Parameters and moments behind two steps, from the same gradients each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 60))
    batch = (torch.randn(4, 16),)
    states = {}
    for flag in ("interpret", "off"):
        monkeypatch.setenv("MSC_TRITON", flag)
        program = msc.compile(model, batch, mesh="tp=2", loss_fn=torch.mean, optimizer=optimizer)
        state = None
        for _ in range(2):
            result = program.run_virtual(batch, state)
            state = result.state
        states[flag] = result.params
        assert entries >= ({"adam"} if isinstance(optimizer, msc.AdamW) else {"lamb_step"})
    for name, expected in states["off"].items():
        assert relative_error(states["interpret"][name], expected, 0.0) <= 1e-5, name


def test_bfloat16(entries: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are within the rounding of bfloat16 of those in ATen."""
    found = {}
    for flag in ("interpret", "off"):
        monkeypatch.setenv("MSC_TRITON", flag)
        program = msc.compile(gpt(), ids(2), precision="bf16-mixed", mesh="tp=2")
        found[flag] = program.run_virtual(ids(2)).grads
    scale = max(float(value.abs().max()) for value in found["off"].values())
    for name, expected in found["off"].items():
        assert relative_error(found["interpret"][name], expected, scale, 0.05) <= 5e-2, name


def test_the_memory_of_a_step_is_predicted(entries: set[str]) -> None:
    program = msc.compile(gpt(0.1), ids(1), optimizer=msc.AdamW(max_norm=1.0))
    graph = program.rank_graph(0)
    given = program.initial_state(0).arguments(graph, program.local_inputs(ids(1), 0))
    with StorageMeter(given) as meter:
        program.virtual_runs.executor(torch.device("cpu")).run([given])
    predicted = MemoryPredictor(program.kernels("interpreter")).bytes(graph)
    assert predicted == pytest.approx(meter.peak, rel=0.02)
    assert {"adam", "gemm", "norm_backward", "dropout"} <= entries
