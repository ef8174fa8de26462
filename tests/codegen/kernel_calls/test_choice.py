"""Which calls of a program run in kernels, what is said of it, and what happens when one fails."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import msc
from msc.codegen.emit import emit
from msc.codegen.kernel_calls import call, choice, device
from msc.codegen.kernel_calls.device import kernels_on
from msc.codegen.kernels import gemm, optimizer
from msc.codegen.kernels import launch as launching
from msc.codegen.kernels.description import Kernel
from msc.runtime.actions import LocalActions

CPU = torch.device("cpu")
LONG = pytest.mark.skipif("MSC_TEST_LONG" not in os.environ, reason="takes a minute")


class Model(nn.Module):
    """Two linears of different dtypes, a norm and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(x))).double())
        return functional.cross_entropy(y, labels)


def compiled(**options: Any) -> tuple[msc.Program, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 16), "labels": torch.randint(0, 16, (8,))}
    return msc.compile(Model(), batch, **options), batch


@pytest.fixture
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSC_TRITON", "interpret")


def test_without_the_flag_the_cpu_runs_aten() -> None:
    program, _ = compiled()
    (line,) = program.kernels().lines
    assert line == "ATen computes every op: no kernels run on 'cpu' but in Triton's interpreter"
    assert line in str(program.explain())


def test_each_op_has_its_kernels_or_the_reason_why_not(interpret: None, tmp_path: Path) -> None:
    program, _ = compiled()
    with pytest.warns(RuntimeWarning, match="no Triton kernel and run in ATen") as caught:
        text = str(program.explain())
    warned = str(caught[0].message)
    assert len(caught) == 1
    found = program.kernels().lines
    assert found[0] == "Triton kernels on interpreter: MSC_TRITON=interpret"
    fused = "msc.linear_epilogue in up: Triton, gemm_mk_nk_bias_relu_8x32x16_fp32: what follows"
    assert fused in text
    refused = (
        "msc.linear in down: ATen: gemm: no kernel computes on float64; there are kernels for "
        "bfloat16, float16, float32. ATen's own op takes every dtype."
    )
    assert refused in text
    assert refused in warned
    assert "in up: " not in warned
    program.dump(tmp_path)
    folder = tmp_path / "kernels"
    assert (folder / "index.txt").read_text().splitlines() == list(found)
    written = {path.read_text() for path in folder.glob("*.py")}
    assert written == {kernel.source for kernel in program.kernels().sources}
    assert "kernels/index.txt" in (tmp_path / "index.txt").read_text()
    program.save(tmp_path / "saved")
    with pytest.warns(RuntimeWarning, match="run in ATen"):
        assert msc.load(tmp_path / "saved").kernels().lines == found


def test_the_text_that_is_shown_is_the_one_that_runs(
    interpret: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, batch = compiled(optimizer=msc.AdamW())
    launched: list[Kernel] = []
    real = launching.launch

    def launch(kernel: Kernel, values: Any) -> None:
        launched.append(kernel)
        real(kernel, values)

    monkeypatch.setattr(call, "launch", launch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the interpreter, and that float64 has no kernels
        program.run_virtual(batch)
    assert {kernel.source for kernel in launched} == {k.source for k in program.kernels().sources}
    names = {kernel.entry for kernel in launched}
    assert {"gemm", "norm_forward", "norm_backward"} <= names
    assert "adam" not in names  # moments of two dtypes: float64 has none


@pytest.mark.parametrize("where", ["text", "trace"])
def test_a_kernel_that_does_not_compile_falls_back_with_one_warning(
    interpret: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real = gemm.emit

    def broken(own: gemm.Gemm) -> Kernel:
        kernel = real(own)
        text = "def gemm(:" if where == "text" else "raise RuntimeError('no such device')"
        return dataclasses.replace(kernel, source=f"{text}\n{kernel.source}")

    monkeypatch.setattr(gemm, "emit", broken)
    monkeypatch.setattr(call, "_warned", set())
    program, batch = compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = program.run_virtual(batch)
        program.run_virtual(batch)
    failures = [str(each.message) for each in caught if "does not compile" in str(each.message)]
    assert [text.split(" runs without")[0] for text in failures] == [
        "msc.linear_epilogue in up",
        "msc.linear_dgrad in up",
        "msc.linear_wgrad in up",
    ]
    monkeypatch.setenv("MSC_TRITON", "off")
    plain, _ = compiled()
    torch.testing.assert_close(found.grads, plain.run_virtual(batch).grads, rtol=1e-5, atol=1e-6)
    monkeypatch.setenv("MSC_TRITON", "interpret")
    call_in_up = "msc.linear_epilogue in up: ATen: "
    (line,) = [line for line in program.kernels().lines if line.startswith(call_in_up)]
    assert line.startswith(f"{call_in_up}gemm_mk_nk_bias_relu_8x32x16_fp32 does not compile")


def test_what_the_flag_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSC_TRITON", "yes")
    with pytest.raises(msc.UserError, match=r"MSC_TRITON='yes' is not known; it is 'interpret'"):
        kernels_on(CPU)
    with pytest.raises(msc.UserError, match=r"MSC_TRITON='yes' is not known"):
        compiled()  # which asks for no device
    monkeypatch.setenv("MSC_TRITON", "all")
    with pytest.raises(msc.UserError, match="needs a CUDA device, and the program runs on 'cpu'"):
        kernels_on(CPU)
    monkeypatch.setenv("MSC_TRITON", "interpret")
    with pytest.raises(msc.UserError, match=r"runs kernels on the CPU.*device='cpu'"):
        kernels_on(torch.device("cuda"))
    monkeypatch.setenv("MSC_TRITON", "off")
    assert kernels_on(torch.device("cuda")).target is None
    program, _ = compiled()
    with pytest.raises(msc.UserError, match="target is 'sm_70'; kernels are made for sm_80, sm_90"):
        program.kernels("sm_70")


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((9, 0), None, "sm_90"), ((8, 0), None, "sm_80"), ((8, 9), None, ""), ((9, 0), "6.4", "")],
)
def test_cuda_devices(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, expected: str
) -> None:
    card = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=114, name="a card"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    for flag in ("", "all"):
        monkeypatch.setenv("MSC_TRITON", flag)
        found = kernels_on(torch.device("cuda"))
        assert found.asked == (flag == "all")
        if expected:
            assert found.target is not None
            assert (found.target.name, found.target.processors) == (expected, 114)
        else:
            assert found.target is None
            assert found.reason == "kernels are checked for sm_80 and sm_90, and this is a card"


def test_on_a_device_the_library_keeps_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = compiled()
    lines = program.kernels("sm_90").lines
    assert lines[0] == "Triton kernels on sm_90: made for sm_90"
    (up,) = [line for line in lines if line.startswith("msc.linear_dgrad in up")]
    assert up.startswith("msc.linear_dgrad in up: ATen: cuBLAS does it all in one call")
    (up,) = [line for line in lines if line.startswith("msc.linear_epilogue in up")]
    assert up.startswith("msc.linear_epilogue in up: ATen: cuBLAS, then a pass over memory: no")
    assert any("norm_forward" in line for line in lines)
    monkeypatch.setenv("MSC_TRITON", "all")
    assert any("gemm_mk_nk_bias_relu" in line for line in program.kernels("sm_90").lines)


COMPILED = """
import json, os, warnings
import torch
import msc
from msc.codegen.kernel_calls.call import KernelCall
from msc.codegen.kernel_calls.choice import OPS
from msc.codegen.kernels.ahead_of_time import compile_kernel
from msc.codegen.kernels.description import SM_90
from tests.models import GPT

torch.manual_seed(0)
model = GPT(width=256, heads=4, layers=1, length=128)
ids = torch.randint(0, 96, (2, 128))
batch = {"ids": ids, "targets": ids}
program = msc.compile(model, batch, optimizer=msc.AdamW(), precision="PRECISION")
kernels = {kernel.entry: kernel for kernel in program.kernels("TARGET").sources}
rows = [compile_kernel(kernels[entry]) for entry in ENTRIES or kernels]

# a device that Triton has no driver for: this process's
x, w = torch.randn(2, 128, 64).bfloat16()
function = torch.ops.msc.linear.default
call = KernelCall("msc_linear", " in fc", OPS[function].maker(SM_90, x, w), function)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert torch.equal(call(x, w), function(x, w))
    assert torch.equal(call(x, w), function(x, w))
said = [str(each.message) for each in caught]
print(json.dumps([{row.name: row.faults() for row in rows}, said]))
"""


@pytest.mark.parametrize(
    ("model", "target", "precision", "entries"),
    [
        ("GPT", "sm_90", "bf16-mixed", ["gemm", "attention_forward", "norm_backward", "adam"]),
        ("Llama", "sm_90", "bf16-mixed", ["gemm", "gate_backward", "norm_forward"]),
        pytest.param("GPT", "sm_90", "bf16-mixed", [], marks=LONG),
        pytest.param("GPT", "sm_80", "bf16-mixed", [], marks=LONG),
        pytest.param("GPT", "sm_90", "float32", [], marks=LONG),
    ],
)
def test_the_kernels_of_a_program_compile_for_a_device(
    model: str, target: str, precision: str, entries: list[str]
) -> None:
    """One of each kind: without a spill, within shared memory, in order (`make kernels`)."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    text = COMPILED.replace("GPT", model).replace("TARGET", target).replace("PRECISION", precision)
    text = text.replace("ENTRIES", repr(entries))
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment | {"MSC_TRITON": "all", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, said = json.loads(done.stdout.splitlines()[-1])
    (warned,) = said
    assert warned.startswith("msc_linear in fc runs without its Triton kernel: gemm_mk_nk_128x128")
    assert len(found) >= (len(entries) or (11 if precision == "bf16-mixed" else 7))
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_a_step_whose_kernel_fails_is_torchs(
    interpret: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = optimizer.emit_adam

    def broken(moments: optimizer.Moments) -> Kernel:
        return dataclasses.replace(real(moments), source="raise RuntimeError('no such device')")

    monkeypatch.setattr(optimizer, "emit_adam", broken)
    monkeypatch.setattr(call, "_warned", set())
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(16, 8)), (torch.randn(4, 16),)
    options: Any = {"loss_fn": torch.mean, "optimizer": msc.AdamW()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = msc.compile(model, batch, **options).run_virtual(batch).params
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(said) == 1
    assert said[0].startswith("adam runs without its Triton kernel: adam_2_fp32_fp32 does")
    monkeypatch.setenv("MSC_TRITON", "off")
    expected = msc.compile(model, batch, **options).run_virtual(batch).params
    torch.testing.assert_close(found, expected)


def test_a_compiler_gets_what_is_left_between_kernels(interpret: None) -> None:
    """`backend="inductor"`: the pieces it compiles hold no call that has kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 8))
    batch = (torch.randn(4, 16),)
    program = msc.compile(model, batch, loss_fn=torch.mean)
    chosen = program.kernels()
    pieces: list[fx.GraphModule] = []

    def compile_chunk(piece: fx.GraphModule) -> Any:
        pieces.append(piece)
        return piece

    graph = program.rank_graph(0)
    emitted = emit(graph, "process", compile_chunk, chosen)
    inside = {node.target for piece in pieces for node in piece.graph.nodes}
    assert torch.ops.aten.relu.default in inside
    assert inside.isdisjoint(choice.OPS)
    given = program.initial_state(0).arguments(graph, program.local_inputs(batch, 0))
    found = emitted.program(LocalActions(program.mesh, 0), given)
    loss = program.run_virtual(batch).loss
    assert any(torch.equal(value, loss) for value in pytree.tree_leaves(found))
