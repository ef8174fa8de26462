"""The check of a GPU, run on the CPU: every op at a tiny size, planted faults, its refusal."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_check
from benchmarks.gpu_cases import FAMILIES, TINY, Case, Make

KINDS = ("bfloat16", "float32")


def cases() -> list[Case]:
    make = Make("cpu")
    return [case for family in FAMILIES for case in family(make, TINY, torch.float32)]


def test_every_op_is_right_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check", "--cpu", "--results", str(tmp_path)])
    assert gpu_check.main() == 0
    data = json.loads((tmp_path / "gpu_check_cpu.json").read_text())
    assert {row["status"] for row in data["rows"]} == {"ok"}
    names = {row["name"].split(",")[0].split()[0] for row in data["rows"]}
    assert names >= {
        "linear",
        "linear_dgrad",
        "linear_wgrad",
        "linear_bgrad",
        "attention",
        "attention_backward",
        "nll_terms",
        "nll_terms_backward",
        "embedding",
        "embedding_wgrad",
        "dropout",
        "adamw",
    }
    kernels = {row["name"] for row in data["rows"] if row["name"].startswith("kernel ")}
    assert {name.removeprefix("kernel ") for name in kernels} == {
        "gemm",
        "gather_gemm, flags set, over gemm",
        "gemm + bias + gelu",
        "gemm + swiglu, two weights",
        "gate",
        "gate backward",
        "attention causal",
        "attention_backward causal",
        "attention window 4",
        "attention_backward window 4",
        "rms_norm + residual",
        "rms_norm backward + residual",
        "cross_entropy terms",
        "cross_entropy gradient",
        "linear_cross_entropy terms",
        "dropout",
        "adamw",
        "gather_gemm over PCIe, n=48",
        "gemm_scatter over PCIe, n=48",
        "gather_gemm, copies paced to 150 GB/s",
        "gather_gemm, copies paced to 300 GB/s",
        "gather_gemm, copies paced to 450 GB/s",
        "gemm_scatter, 2 virtual ranks",
        "gemm_scatter, 2 virtual ranks, same bits",
    }
    assert any(row["message"] == "no CUDA graph: the CPU has none" for row in data["rows"])
    (fused,) = [row for row in data["rows"] if row["name"].startswith("fused collectives")]
    assert "no kernel given up" in fused["message"]
    assert "attention causal, grouped heads" in capsys.readouterr().out


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert capsys.readouterr().err.startswith("gpu_check needs a CUDA device, and torch finds none")


def test_a_wrong_result_is_found() -> None:
    """Each op's results, a little off in one element."""
    for case in cases():
        found = case.run()
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        spoiled = [result.clone() for result in results]
        first = spoiled[0]
        first[(0,) * first.dim()] += 0.01 * first.abs().max() + 1e-3
        wrong = dataclasses.replace(case, run=functools.partial(list, spoiled))
        row = gpu_check.check(wrong, "cpu", 1)
        assert row.status == "wrong", case.name


def test_an_op_that_fails_is_a_row() -> None:
    def fail() -> Tensor:
        raise RuntimeError("no kernel")

    case = Case("op", fail, fail, None, 1.0, "GB/s", torch.float32)
    row = gpu_check.check(case, "cpu", 1)
    assert (row.status, row.message) == ("failed", "RuntimeError: no kernel")


def test_errors() -> None:
    one = torch.ones(3)
    assert gpu_check.error_of(one, one.double(), exact=True) == 0
    assert gpu_check.error_of(one + 1e-3, one, exact=False) == pytest.approx(1e-3, rel=1e-3)
    assert gpu_check.error_of(one + 1e-3, one, exact=True) == math.inf
    assert gpu_check.error_of(one[:2], one, exact=False) == math.inf
    assert gpu_check.error_of(one * math.nan, one, exact=False) == math.inf


def test_what_does_not_fit_into_the_time_is_listed() -> None:
    rows = gpu_check.run("cpu", TINY, [torch.float32], seconds=-1)
    assert [row.status for row in rows] == ["skipped"] * len(gpu_check.FAMILIES)
    assert rows[0].name == "product_kernel"


def test_a_run_goes_on_where_an_earlier_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []

    def family(name: str) -> Callable[..., Iterator[Case]]:
        def made(*_: Any) -> Iterator[Case]:
            began.append(name)
            one = torch.ones(2)
            yield Case(f"op of {name}", lambda: one, lambda: one, None, 1.0, "GB/s", torch.float32)

        made.__name__ = f"{name}_cases"
        return made

    monkeypatch.setattr(gpu_check, "FAMILIES", (family("first"), family("second")))
    monkeypatch.setattr("sys.argv", ["gpu_check", "--cpu", "--results", str(tmp_path), "--resume"])
    file = tmp_path / "gpu_check_cpu.json"
    assert gpu_check.main() == 0
    data = json.loads(file.read_text())
    families = [row["family"] for row in data["rows"]]
    assert families == [f"{name} {kind}" for kind in KINDS for name in ("first", "second")]
    data["rows"] = [*data["rows"][:3], {**data["rows"][3], "status": "skipped", "family": ""}]
    file.write_text(json.dumps(data))
    began.clear()
    assert gpu_check.main() == 0
    assert began == ["second"]
    assert len(json.loads(file.read_text())["rows"]) == 4
    data["torch"] = "another"
    file.write_text(json.dumps(data))
    assert gpu_check.main() == 0
    assert began == ["second", *["first", "second"] * 2]
