"""Norm kernels in the interpreter against float64 autograd."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from msc.codegen.kernels import column_sums, norm
from msc.codegen.kernels.description import SM_80
from msc.codegen.kernels.launch import launch
from msc.codegen.kernels.norm import Norm
from msc.ir.errors import PlanError
from msc.testing.interpreter import interpreted
from tests.codegen.kernels.fused import error, poisoned

FEW = dataclasses.replace(SM_80, processors=1)
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


def reference(case: Norm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if case.layer:
        return functional.layer_norm(x, (case.width,), weight, bias, case.eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.eps) * weight


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [24, 4100])
def test_forward_and_backward(kind: str, residual: bool, width: int, dtype: str) -> None:
    rows = 5 if width > 1000 else 20
    case = Norm(kind, rows, width, dtype, FEW, residual=residual)
    assert case.programs < rows  # a program has several rows
    stored = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(stored)

    x, other, gy, g_summed = (random(rows, width) for _ in range(4))
    weight, bias = random(width), random(width)
    y, summed, dx = (poisoned(rows, width, dtype=stored) for _ in range(3))
    mean, rstd = (poisoned(rows, dtype=torch.float32) for _ in range(2))
    dw_parts, db_parts = (poisoned(case.programs, width, dtype=torch.float32) for _ in range(2))
    dw, db = (poisoned(width, dtype=stored) for _ in range(2))
    layer = {"mean": mean} if case.layer else {}
    shift = {"bias": bias} if case.layer else {}
    before = {"residual": other, "summed": summed} if residual else {}
    entering = summed if residual else x
    behind = {"g_summed": g_summed} if residual else {}
    parts = {"dw_parts": dw_parts} | ({"db_parts": db_parts} if case.layer else {})
    known = {"gy": gy, "x": entering, "rstd": rstd, **layer}
    with interpreted():
        given = {"x": x, "weight": weight, "y": y, "rstd": rstd, **before, **layer, **shift}
        launch(norm.emit_forward(case), given)
        own = parts if case.sums_in_backward else {}
        backward = norm.emit_backward(case)
        launch(backward, {**known, "weight": weight, "dx": dx, **behind, **own})
        if not case.sums_in_backward:
            launch(norm.emit_weight_gradient(case), {**known, **parts})
        sums = column_sums.emit(case.programs, width, dtype, SM_80)
        launch(sums, {"parts": dw_parts, "total": dw})
        if case.layer:
            launch(sums, {"parts": db_parts, "total": db})
    if residual:
        assert torch.equal(summed, x + other)
    leaves = [value.double().requires_grad_() for value in (entering, weight, bias)]
    expected = reference(case, *leaves)
    grads = torch.autograd.grad(expected, leaves, gy.double(), allow_unused=True)
    wanted = grads[0] + (g_summed.double() if residual else 0)
    assert error(y, expected.detach()) <= TOLERANCE[dtype]
    assert error(dx, wanted) <= TOLERANCE[dtype]
    assert error(dw, grads[1]) <= TOLERANCE[dtype]
    if case.layer:
        assert error(db, grads[2]) <= TOLERANCE[dtype]


def test_refusals() -> None:
    with pytest.raises(PlanError, match="a norm is 'layer' or 'rms', not 'batch'"):
        Norm("batch", 8, 8, "float32", SM_80)
    with pytest.raises(PlanError, match="rows of up to 65536 elements, not 100000"):
        Norm("rms", 8, 100_000, "float32", SM_80)
