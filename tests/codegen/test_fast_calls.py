"""Each public function equals the overload that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msc.codegen.fast_calls import FAST_CALLS

A = torch.ops.aten
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
POSITIVE = X.abs() + 0.5
STACK = X.view(2, 2, 6)
WEIGHT = torch.linspace(-1, 1, 6)

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (A.add.Tensor, (X, POSITIVE), {"alpha": 2}),
    (A.add.Tensor, (X, 1.5), {}),
    (A.sub.Tensor, (X, POSITIVE), {"alpha": 3}),
    (A.mul.Tensor, (X, 2.0), {}),
    (A.mul.Tensor, (X, torch.tensor(2.0, dtype=torch.float64)), {}),
    (A.div.Tensor, (X, 3), {}),
    (A.div.Tensor, (torch.arange(4), 3), {}),
    (A.neg.default, (X,), {}),
    (A.exp.default, (X,), {}),
    (A.log.default, (POSITIVE,), {}),
    (A.rsqrt.default, (POSITIVE,), {}),
    (A.tanh.default, (X,), {}),
    (A.sigmoid.default, (X,), {}),
    (A.relu.default, (X,), {}),
    (A.pow.Tensor_Scalar, (X, 2), {}),
    (A.mm.default, (X, X.t()), {}),
    (A.bmm.default, (STACK, STACK.transpose(1, 2)), {}),
    (A.addmm.default, (torch.ones(4), X, X.t()), {"beta": 2, "alpha": 3}),
    (A.cat.default, ([X, POSITIVE], 1), {}),
    (A.cat.default, ([X, POSITIVE],), {}),
    (A.sum.dim_IntList, (X, [0], True), {}),
    (A.sum.dim_IntList, (X, [0, 1]), {"dtype": torch.float64}),
    (A.mean.dim, (X, [-1], True), {}),
    (A.view.default, (X, [2, -1]), {}),
    (A.expand.default, (X, [3, 4, -1]), {}),
    (A.permute.default, (STACK, [2, 0, 1]), {}),
    (A.transpose.int, (X, 0, 1), {}),
    (A.t.default, (X,), {}),
    (A.unsqueeze.default, (X, 1), {}),
    (A.squeeze.dim, (X[:1], 0), {}),
    (A.select.int, (X, 1, 2), {}),
    (A.where.self, (X > 0, X, POSITIVE), {}),
    (A.native_layer_norm.default, (X, [6], WEIGHT, WEIGHT, 1e-5), {}),
    (A.native_layer_norm.default, (X, [6], None, None, 1e-5), {}),
]


@pytest.mark.parametrize(("overload", "args", "kwargs"), CALLS)
def test_results_are_equal(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found, expected = FAST_CALLS[overload](*args, **kwargs), overload(*args, **kwargs)
    if not isinstance(expected, tuple):
        found, expected = (found,), (expected,)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_all_are_tested() -> None:
    assert {overload for overload, _, _ in CALLS} == set(FAST_CALLS)
