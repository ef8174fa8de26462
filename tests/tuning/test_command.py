"""`msc tune`, and the commands that go by what it has measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from msc import cli

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return model, (torch.randn(8, 8),), torch.sum
"""


@pytest.mark.gloo
def test_what_was_tuned_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_of_tune_test.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    target, file = "model_of_tune_test:build", str(tmp_path / "tuned.json")

    def run(*words: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(cli.app, list(words))
        return result.exit_code, result.stdout, result.stderr

    code, shown, _ = run("tune", target, file, "--mesh", "tp=2", "--device", "cpu", "--fuse-loss")
    assert code == 0
    assert shown.startswith(f"{file}: ")
    for name, *rest in (("compile",), ("simulate", "--cluster", "a100"), ("explain",)):
        assert run(name, target, "--mesh", "tp=2", "--tuned", file, *rest)[0] == 0
    code, _, told = run("compile", target, "--tuned", f"{file}.missing")
    assert code == 2
    assert "'msc tune' writes them" in " ".join(told.split())
    code, _, told = run("tune", target, file, "--device", "cuda")
    assert code == 2
    assert "finds no CUDA device here" in " ".join(told.split())
