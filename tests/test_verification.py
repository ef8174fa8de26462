"""How `msc.verify` measures gradients that have no digits to agree in, and all others."""

from __future__ import annotations

import pytest
import torch

from msc.verification import _gradient_error


def error(value: float, reference: float) -> float:
    """In float64, of a model whose largest gradient is 1."""
    found, wanted = (torch.tensor([each], dtype=torch.float64) for each in (value, reference))
    return _gradient_error(found, wanted, scale=1.0, floor=1e-6, tolerance=1e-10)


@pytest.mark.parametrize(("value", "reference"), [(3e-16, -1e-16), (0.0, 8e-16)])
def test_rounding_of_the_largest_gradient_is_no_error(value: float, reference: float) -> None:
    assert 0 < error(value, reference) <= 1e-10


@pytest.mark.parametrize(("value", "reference"), [(1e-14, 1e-16), (2e-15, 0.0), (1e-3, 1e-16)])
def test_more_than_that_is_one(value: float, reference: float) -> None:
    assert error(value, reference) > 1e-10


def test_what_has_digits_is_measured_as_ever() -> None:
    assert error(1e-8 * (1 + 1e-7), 1e-8) == pytest.approx(1e-9, rel=1e-3)  # against 1e-6
    assert error(1e-2 * (1 + 3e-10), 1e-2) == pytest.approx(3e-10, rel=1e-3)
