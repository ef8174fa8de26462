"""What a run shows: a bar on a terminal, a bounded number of lines elsewhere, or nothing."""

from __future__ import annotations

import io
import sys

import pytest

from msc.progress import TrainingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(log: bool, steps: int, done: int = 0) -> None:
    with TrainingProgress(log, done, steps, 2048, "tokens") as progress:
        for step in range(done + 1, done + steps + 1):
            progress.step(step, 1 / step)


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    show(True, 4)
    assert "4/4" in terminal.getvalue()
    assert "loss 0.2500" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()


def test_a_file_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(True, 1000, done=100)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 21
    assert lines[0].startswith("step 101/1100  loss 0.0099  ")
    assert lines[-1].startswith("step 1100/1100  loss 0.0009  ")
    assert all(line.endswith(" tokens/s") for line in lines)


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    show(False, 3)
    assert capsys.readouterr() == ("", "")


def test_a_skipped_step_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "step 3 skipped: the gradients' norm is inf; 2 skipped in all"
    lines: list[str] = []
    for log in (True, lines.append, False):
        with TrainingProgress(log, 0, 1000, 1, "samples") as progress:
            progress.skipped(3, float("inf"), 2)
    assert lines == [line]
    assert capsys.readouterr().err.splitlines() == [line]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with TrainingProgress(True, 0, 4, 1, "samples") as progress:
        progress.skipped(3, float("inf"), 2)
    assert line in terminal.getvalue()
