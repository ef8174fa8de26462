"""Sums that the gloo transport makes itself; what it sends is tested with real processes."""

from __future__ import annotations

import pytest
import torch

from msc.runtime import collectives, transport


@pytest.mark.parametrize("op", sorted(collectives.REDUCTIONS))
@pytest.mark.parametrize(("size", "position"), [(2, 0), (2, 1), (3, 1), (4, 0), (4, 3)])
def test_reductions_are_those_of_the_virtual_executor(op: str, size: int, position: int) -> None:
    """Bit for bit, and the member's own value is not written to."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(5, 3, generator=generator) for _ in range(size)]
    expected = collectives.REDUCTIONS[op](values)
    own = values[position].clone()
    found = transport._reduce(values, position, op)
    assert torch.equal(found, expected)
    assert torch.equal(values[position], own)
    assert found is not values[position]
