"""What the benchmark counts: memory of both ways, as predicted."""

from __future__ import annotations

import pytest

from benchmarks.fused_loss import measure
from benchmarks.models import GPTConfig


def test_memory_falls_and_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msc.ir.ops.linear_loss.CPU_LOGITS_BYTES", 1 << 16)
    row = measure(GPTConfig(1, 16, 2, 16, 2048), "float32", rounds=1)
    assert row.measured == pytest.approx(row.predicted, rel=0.03)
    logits = 4 * 16 * 2048 * 4
    assert row.beyond[0] - row.beyond[1] > logits
    assert row.ratio > 0
