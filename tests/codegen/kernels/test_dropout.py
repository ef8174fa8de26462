"""The dropout kernel gives the very bits of `msc.dropout`, whole and for a rank's part."""

from __future__ import annotations

import pytest
import torch

import msc.ir.ops  # noqa: F401  registers the ops
from msc.codegen.kernels import dropout
from msc.codegen.kernels.description import SM_90
from msc.codegen.kernels.dropout import Dropout
from msc.codegen.kernels.launch import launch
from msc.ir.errors import PlanError
from msc.ir.ops.random import flat_indices
from msc.testing.interpreter import interpreted
from tests.codegen.kernels.fused import poisoned

OPS = torch.ops.msc


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("columns", [None, torch.arange(1, 80, 2)])
def test_bits(p: float, dtype: str, columns: torch.Tensor | None) -> None:
    shape = [3, 11, 80]
    width = 80 if columns is None else len(columns)
    x = torch.randn(3, 11, width).to(getattr(torch, dtype))
    key = OPS.rng_key(torch.tensor([5, 7]), 3)
    coordinates = [None, None, columns]
    rows, places = flat_indices(coordinates, shape, x.device)
    y = poisoned(33, width, dtype=x.dtype)
    values = {"x": x.view(33, width), "row_places": rows, "y": y}
    if columns is not None:
        values["column_places"] = places
    with interpreted():
        kernel = dropout.emit(Dropout(33, width, p, dtype, SM_90, whole_rows=columns is None))
        launch(kernel, {**values, "key": key.view(1)})
    wanted = OPS.dropout(x, p, key, coordinates, shape)
    assert torch.equal(y.view(x.shape) == 0, wanted == 0)
    torch.testing.assert_close(y.view(x.shape), wanted)


def test_a_probability_of_one_is_refused() -> None:
    with pytest.raises(PlanError, match="0 <= p < 1, not 1"):
        Dropout(8, 8, 1, "float32", SM_90)
