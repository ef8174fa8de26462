"""The ahead-of-time gate: the report in the repository is clean and whole, and faults are found.

What compiles runs in processes of its own, because this one interprets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernels as command
from msc.codegen.kernels.ahead_of_time import Report
from msc.codegen.kernels.catalogue import kernels
from msc.codegen.kernels.description import TARGETS
from msc.codegen.kernels.ptx_order import UNFENCED_LOAD, UNFINISHED_BULK, UNORDERED_STORE

ROOT = Path(__file__).parents[2]
REPORT = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())["kernels"]
LONG = "MSC_TEST_LONG" in os.environ  # set by `make test-long`

# One of every kind, on the target where it is hardest.
SAMPLE = (
    "gather_gemm_nk_tp8_8192x12288_to_6144_bias_gelu_tanh_keep_bf16 sm_90",
    "gemm_scatter_nk_tp8_8192x12288x6144_bf16 sm_90",
    "gather_x_weight_gradient_tp8_8192x6144x12288_bf16 sm_90",
    "gather_gemm_nk_tp8_8192x8192_to_1024_128_128_bf16 sm_80",
    "attention_backward_keys_causal_window1024_1x8192x12g12x128_bf16 sm_90",
    "norm_backward_layer_residual_8192x12288_bf16 sm_80",
    "linear_cross_entropy_terms_8192x6400x12288_bf16 sm_90",
    "lamb_step_4_bf16_bf16 sm_90",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process that compiles."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    call = [sys.executable, *arguments]
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_report_is_clean_and_has_every_kernel() -> None:
    reports = [Report(**row) for row in REPORT]
    assert [report.name for report in reports if report.faults()] == []
    found = [(report.name, report.target) for report in reports]
    assert found == [(k.name, k.target.name) for target in TARGETS for k in kernels(target)]
    assert {report.target for report in reports if report.wgmma} == {"sm_90"}


def test_the_report_is_of_the_kernels_as_they_are_emitted() -> None:
    """The compiler is deterministic: the same sources give the same report. Else: make kernels."""
    kept = (ROOT / "benchmarks" / "results" / "kernels.sha256").read_text().strip()
    assert command.digest(command.selected([])) == kept


def test_kernels_compile_as_reported(tmp_path: Path) -> None:
    only = ["sm_"] if LONG else SAMPLE
    sources = tmp_path / "sources"
    where = ("--results", str(tmp_path), "--sources", str(sources))
    arguments = ("--processes", "1", *where, "--only", *only)
    result = run("-m", "benchmarks.kernels", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    assert LONG or len(rows) == len(SAMPLE)
    assert len(list(sources.rglob("*.py"))) == len(rows)
    known = {(row["name"], row["target"]): without_time(row) for row in REPORT}
    for row in rows:
        assert without_time(row) == known[row["name"], row["target"]]


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "compile_s"}


MUTANTS = """
import dataclasses, json
from msc.codegen.kernels.ahead_of_time import compile_kernel
from msc.codegen.kernels.gemm import Gemm, emit
from msc.codegen.kernels.catalogue import kernels
from msc.codegen.kernels.description import SM_90, Tiles

found = {kernel.name: kernel for kernel in kernels(SM_90)}

def faults(name, old="", new="", **changes):
    kernel = found[name]
    assert old in kernel.source
    source = kernel.source.replace(old, new)
    return compile_kernel(dataclasses.replace(kernel, source=source, **changes)).faults()

GATHER = "gather_gemm_nk_tp8_8192x12288_to_6144_bf16"
SCATTER = "gemm_scatter_nk_tp8_8192x12288x6144_bf16"
FENCE = "fence.proxy.async.global; "
STORE = "        c.store([row, column], acc_left.to(tl.bfloat16))"
BARRIER = "        tl.debug_barrier()"
SIGNAL = '        tl.atomic_add(flags, 1, sem="release", scope="sys")'
def gemm(parts):
    tiles = Tiles(128, 256, 64, stages=4, parts=parts)
    return compile_kernel(emit(Gemm(8192, 6144, 12288, "bfloat16", SM_90, tiles))).faults()

print(json.dumps({
    "whole tiles": gemm(1),
    "tiles in two parts": gemm(2),
    "no fence": faults(GATHER, FENCE),
    "signal after a TMA store": faults(GATHER, STORE, f"{STORE}\\n{BARRIER}\\n{SIGNAL}"),
    "no barrier": faults(SCATTER, "    tl.debug_barrier()\\n"),
    "four warps": faults(SCATTER, warps=4),
    "eight stages": faults(GATHER, stages=8),
    "no tensor cores": faults(GATHER, "tl.dot(left, right.T, acc)", "acc + tl.sum(left)"),
}))
"""


def test_faults_are_found() -> None:
    result = run("-c", MUTANTS)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert any(UNFENCED_LOAD in fault for fault in found["no fence"])
    assert any(UNFINISHED_BULK in fault for fault in found["signal after a TMA store"])
    assert any(UNORDERED_STORE in fault for fault in found["no barrier"])
    assert any("spills" in fault for fault in found["four warps"])
    assert any(
        "bytes of shared memory; there are 232448" in fault for fault in found["eight stages"]
    )
    assert "no wgmma" in found["no tensor cores"]
    # of two ways to store the same tile, one needs more shared memory than there is
    assert found["tiles in two parts"] == []
    assert found["whole tiles"] == ["262176 bytes of shared memory; there are 232448"]


def test_a_process_that_interprets_cannot_compile() -> None:
    from msc.codegen.kernels.ahead_of_time import compile_kernel

    with pytest.raises(RuntimeError, match="imported with TRITON_INTERPRET=1"):
        compile_kernel(kernels(TARGETS[0])[0])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    good = Report("a", "sm_90", 128, 0, 1000, 2000, True, True, [], 0.5)
    bad = Report("b", "sm_90", 255, 12, 3000, 2000, True, False, ["line 3: wrong"], 0.5)
    assert good.faults() == []
    assert bad.faults() == [
        "12 spills",
        "3000 bytes of shared memory; there are 2000",
        "no wgmma",
        "line 3: wrong",
    ]
    command.show([good, bad])
    assert "b (sm_90): 12 spills" in capsys.readouterr().out
