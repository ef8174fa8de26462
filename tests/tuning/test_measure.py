"""What is measured is kept, and decides where the program runs on the same kind of device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import msc
from msc.cost import Cluster
from msc.cost.measurements import Measurements, versions_here
from msc.tuning import kernels


class Feed(nn.Module):
    """Two linears with a norm before them, whose products are of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y.square().mean()


def model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Feed(), (torch.randn(4, 16, 32),)


@pytest.fixture
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSC_TRITON", "interpret")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    """Of the model in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSC_TRITON", "interpret")
        return msc.tune(*model(), tmp_path_factory.mktemp("tuned") / "tuned.json", log=False)


def test_calls_are_measured_once_in_all_their_ways(interpret: None, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    lines: list[str] = []
    found = msc.tune(*model(), file, log=lines.append)
    assert Measurements.load(file) == found
    (up,) = (
        each for each in found.calls if each.startswith("msc.linear_epilogue(float32[4, 16, 32]")
    )
    assert set(found.calls[up]) == {
        "ATen",
        "Triton 64x64x64 g8 w8 s3 p1",
        "Triton 32x64x64 g8 w8 s3 p1",
    }
    norm = "aten.native_layer_norm(float32[4, 16, 32], [32], float32[32], float32[32], 1e-05)"
    assert set(found.calls[norm]) == {"ATen", "Triton"}
    assert len(lines) == len(found.calls)
    lines.clear()
    assert msc.tune(*model(), file, log=lines.append) == found
    (line,) = lines
    assert line == f"{len(found.calls)} calls are known from '{file}' and not measured again."


def told(found: Measurements, **times: dict[str, float]) -> Measurements:
    """Measurements with other times of all calls of an op."""
    changed = {
        call: next((own for op, own in times.items() if call.startswith(f"msc.{op}(")), ways)
        for call, ways in found.calls.items()
    }
    return found.with_calls(changed)


def test_a_program_runs_each_call_the_fastest_way(interpret: None, measured: Measurements) -> None:
    tiles = "Triton 32x64x64 g8 w8 s3 p1"
    tuned = told(
        measured,
        linear_epilogue={"ATen": 3e-6, "Triton 64x64x64 g8 w8 s3 p1": 2e-6, tiles: 1e-6},
        linear_wgrad={"ATen": 1e-6, tiles: 2.5e-6},
        linear_dgrad={tiles: 2e-6},
    )
    program = msc.compile(*model(), tuned=tuned)
    lines = program.kernels().lines
    kinds = len(lines) - 2
    assert lines[1] == f"{kinds} of {kinds} kinds of calls were measured here"
    (line,) = (each for each in lines if each.startswith("msc.linear_epilogue in up"))
    assert line.endswith("measured: 1.0 us, ATen 3.0 us")
    products = [each for each in program.kernels().sources if each.name.startswith("gemm_mk_nk")]
    assert len(products) == 2
    assert all("BM = tl.constexpr(32)" in each.source for each in products)
    (line,) = (each for each in lines if each.startswith("msc.linear_wgrad in up"))
    assert line == "msc.linear_wgrad in up: ATen: measured: 1.0 us, kernels 2.5 us"
    verified = msc.verify(*model())
    assert program.run_virtual(model()[1]).loss == pytest.approx(verified.loss, rel=1e-5)


def test_measurements_of_another_device_do_not_count(
    interpret: None, measured: Measurements, tmp_path: Path
) -> None:
    own, file = measured, tmp_path / "tuned.json"
    other = Measurements("NVIDIA H200", own.versions, own.calls)
    lines = msc.compile(*model(), tuned=other).kernels().lines
    assert lines[1] == "What was measured is of NVIDIA H200: it does not count here"
    assert lines[2:] == msc.compile(*model()).kernels().lines[1:]
    other.save(file)
    with pytest.raises(msc.UserError, match="has measurements of NVIDIA H200, and this device is"):
        msc.tune(*model(), file)


def test_measurements_stay_with_the_program(tmp_path: Path) -> None:
    tuned = Measurements("NVIDIA H200", {}, {"msc.linear()": {"ATen": 1e-6}})
    program = msc.compile(*model(), tuned=tuned)
    program.save(tmp_path / "program")
    loaded = msc.load(tmp_path / "program")
    assert loaded.measured == tuned
    assert loaded.fingerprint == program.fingerprint != msc.compile(*model()).fingerprint


def test_tiles_that_do_not_pass_the_gate_are_left_out(
    interpret: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faults(plan: Any, target: Any) -> list[str]:
        return ["3 spills"] if "BM = tl.constexpr(32)" in plan.kernels[0].source else []

    monkeypatch.setattr(kernels, "_faults", faults)
    lines: list[str] = []
    found = msc.tune(*model(), tmp_path / "tuned.json", log=lines.append)
    ways = {way for call, seconds in found.calls.items() if "linear" in call for way in seconds}
    assert ways == {"ATen", "Triton 64x64x64 g8 w8 s3 p1"}
    assert any(each.endswith("g8 w8 s3 p1: left out: 3 spills") for each in lines)


@pytest.mark.gloo
def test_fused_collectives_are_measured_and_go_before_the_model(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    lines: list[str] = []
    found = msc.tune(*model(), file, log=lines.append, mesh="tp=2")
    fused = [call for call in found.calls if "all_gather_matmul" in call]
    assert fused
    assert all(set(found.calls[call]) == {"fused", "apart"} for call in found.calls)
    assert lines[0].startswith("No calls in kernels are measured: no kernels run on 'cpu'")
    gains = found.with_calls({call: {"fused": 1e-6, "apart": 2e-6} for call in found.calls})
    losses = found.with_calls({call: {"fused": 2e-6, "apart": 1e-6} for call in found.calls})
    for cluster in (None, Cluster.load("a100")):
        better, worse = (
            msc.compile(*model(), mesh="tp=2", cluster=cluster, tuned=tuned).report
            for tuned in (gains, losses)
        )
        assert not all("left alone" in each for each in better.fused_collectives)
        assert all("left alone" in each for each in worse.fused_collectives)
    report = msc.compile(*model(), mesh="tp=2", tuned=gains).report
    assert any("1.0 us of 2.0 us saved as measured on " in x for x in report.fused_collectives)
    report = msc.compile(*model(), mesh="tp=2", tuned=losses).report
    text = f"left alone: measured on {found.device}, it takes 2.0 us; one after the other takes 1.0"
    assert any(text in each for each in report.fused_collectives)


def test_measurements_of_other_versions_are_noted() -> None:
    (note,) = msc.compile(*model(), tuned=Measurements("a card", {"torch": "1.0"})).report.notes
    assert note.startswith("tuned= was measured on a card with torch 1.0, and here is torch ")
    assert msc.compile(*model(), tuned=Measurements("a card", versions_here())).report.notes == ()


def test_a_file_that_cannot_be_written_is_told_of_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    with pytest.raises(msc.UserError, match=r"missing/tuned.json' cannot be written"):
        msc.tune(*model(), tmp_path / "missing" / "tuned.json", log=lines.append, mesh="tp=2")
    assert lines == []
    wrong: Any = 5
    with pytest.raises(msc.UserError, match="file is a int; it is the path of a JSON file"):
        msc.tune(*model(), wrong, mesh="tp=2")


@pytest.mark.gloo
def test_more_ranks_than_there_are_cores_are_not_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lines: list[str] = []
    batch = (torch.randn(64, 128, 32),)
    found = msc.tune(Feed(), batch, tmp_path / "tuned.json", log=lines.append, mesh="tp=32")
    assert found.calls == {}
    assert re.fullmatch(r"\d+ fused collectives of 32 ranks are not measured: \d+ cores", lines[-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no measurements"),
        (json.dumps({"format": "msc measurements", "version": 9}), "of version 9, and this MSC"),
        (
            json.dumps(
                {
                    "format": "msc measurements",
                    "version": 1,
                    "device": "x",
                    "versions": {},
                    "calls": {"msc.linear()": {"ATen": -1}},
                }
            ),
            "is damaged",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.raises(msc.UserError, match=message):
        msc.compile(*model(), tuned=file)
    with pytest.raises(msc.UserError, match=message):
        msc.tune(*model(), file)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(msc.UserError, match="finds no CUDA device here"):
        msc.tune(*model(), tmp_path / "tuned.json", device="cuda")
    with pytest.raises(msc.UserError, match="device is 'tpu'; it is 'cpu', 'cuda', or None"):
        msc.tune(*model(), tmp_path / "tuned.json", device="tpu")


def test_what_tune_decides_by_itself_cannot_be_given(tmp_path: Path) -> None:
    with pytest.raises(msc.UserError, match="both ways of fuse_collectives"):
        msc.tune(*model(), tmp_path / "tuned.json", fuse_collectives=True)
    with pytest.raises(msc.UserError, match="tuned is a int"):
        msc.compile(*model(), tuned=3)  # type: ignore[arg-type]
