"""Cross entropy kernels against the op that they stand for, whole and on a part of a vocabulary."""

from __future__ import annotations

import pytest
import torch

import msc.ir.ops  # noqa: F401  registers the ops
from msc.codegen.kernels import cross_entropy
from msc.codegen.kernels.cross_entropy import CrossEntropy
from msc.codegen.kernels.description import SM_90
from msc.codegen.kernels.launch import launch
from msc.testing.interpreter import interpreted
from tests.codegen.kernels.fused import error, poisoned

OPS = torch.ops.msc
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "start"), [(50, 0), (40, 13), (9000, 4000)])
def test_terms_and_gradient(width: int, start: int, dtype: str) -> None:
    rows = 9
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(rows, width, generator=generator)).to(getattr(torch, dtype))
    logits[3] = float("-inf")
    logits[4, 1:] = float("-inf")
    target = start + torch.randint(-10, width, (rows,), generator=generator)
    target[5] = -100
    lse, picked = (poisoned(rows, dtype=torch.float64) for _ in range(2))
    g_lse, g_target = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    gradient = poisoned(rows, width, dtype=logits.dtype)
    loss = CrossEntropy(rows, width, dtype, SM_90)
    given = {"logits": logits, "target": target, "lse": lse, "start": start}
    begin = torch.tensor(start)
    with interpreted():
        launch(cross_entropy.emit_terms(loss), {**given, "target_logit": picked})
        known = {**given, "g_lse": g_lse, "g_target": g_target}
        launch(cross_entropy.emit_gradient(loss), {**known, "gradient": gradient})
    wanted_lse, wanted_picked = OPS.nll_terms(logits.double(), target, begin)
    finite = wanted_lse.isfinite()
    assert torch.equal(lse.isneginf(), ~finite)
    assert error(lse[finite], wanted_lse[finite]) <= 1e-6
    assert torch.equal(picked, wanted_picked)
    wanted = OPS.nll_terms_backward(g_lse, g_target, logits.double(), target, wanted_lse, begin)
    assert error(gradient, wanted) <= TOLERANCE[dtype]


def test_the_gradient_may_overwrite_the_logits() -> None:
    logits, target = torch.randn(4, 20), torch.tensor([0, 3, -100, 19])
    lse, _ = OPS.nll_terms(logits, target, None)
    ones = torch.ones(4, dtype=torch.float64)
    wanted = OPS.nll_terms_backward(ones, -ones, logits, target, lse, None)
    kernel = cross_entropy.emit_gradient(CrossEntropy(4, 20, "float32", SM_90))
    known = {"logits": logits, "target": target, "lse": lse, "start": 0}
    launch(kernel, {**known, "g_lse": ones, "g_target": -ones, "gradient": logits})
    assert error(logits, wanted.double()) <= 1e-6
