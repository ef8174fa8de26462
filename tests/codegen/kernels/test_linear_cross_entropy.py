"""Linear head and cross entropy in one, against the logits in float64, whole and in parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import msc.ir.ops  # noqa: F401  registers the ops
from msc.codegen.kernels import linear_cross_entropy
from msc.codegen.kernels.description import SM_80, SM_90, Target, Tiles
from msc.codegen.kernels.launch import launch
from msc.codegen.kernels.linear_cross_entropy import LinearCrossEntropy
from msc.testing.interpreter import interpreted
from tests.codegen.kernels.fused import error, poisoned

OPS = torch.ops.msc
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}
TILES = Tiles(16, 32, 32, group=2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("target", [SM_80, SM_90], ids=lambda target: target.name)
@pytest.mark.parametrize(("m", "n", "k", "start"), [(32, 96, 64, 0), (21, 70, 40, 13)])
def test_terms_and_gradient(m: int, n: int, k: int, start: int, target: Target, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = getattr(torch, dtype)
    x, w = (torch.randn(size, k, generator=generator).to(stored) for size in (m, n))
    labels = start + torch.randint(-20, n + 20, (m,), generator=generator)
    labels[5] = -100
    few = dataclasses.replace(target, processors=3)
    loss = LinearCrossEntropy(m, n, k, dtype, few, TILES)
    lse, picked = (poisoned(m, dtype=torch.float64) for _ in range(2))
    highest, total = (poisoned(loss.columns, m, dtype=torch.float32) for _ in range(2))
    g_lse, g_target = torch.randn(2, m, generator=generator, dtype=torch.float64)
    gradient = poisoned(m, n, dtype=stored)
    given = {"target": labels, "start": start}
    factors = {"x": x, "w": w, **given}
    parts = {"highest": highest, "total": total, "target_logit": picked}
    with interpreted():
        launch(linear_cross_entropy.emit_terms(loss), {**factors, **parts})
        launch(linear_cross_entropy.emit_combine(loss), {**given, **parts, "lse": lse})
        known = {"lse": lse, "g_lse": g_lse, "g_target": g_target, "gradient": gradient}
        launch(linear_cross_entropy.emit_gradient(loss), {**factors, **known})
    logits = x.double() @ w.double().t()
    begin = torch.tensor(start)
    wanted_lse, wanted_picked = OPS.nll_terms(logits, labels, begin)
    # the logits are never rounded to the dtype
    assert error(lse, wanted_lse) <= 1e-6
    assert error(picked, wanted_picked) <= 1e-6
    assert torch.equal(picked == 0, wanted_picked == 0)
    wanted = OPS.nll_terms_backward(g_lse, g_target, logits, labels, wanted_lse, begin)
    assert error(gradient, wanted) <= TOLERANCE[dtype]
