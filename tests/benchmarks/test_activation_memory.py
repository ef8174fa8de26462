"""What a layer saves is what Korthikanti et al. count, but for the items that are listed."""

from __future__ import annotations

import pytest

from benchmarks.activation_memory import SIZES, TENSOR_PARALLEL, measure


@pytest.mark.parametrize(
    ("tensor_parallel", "policy"),
    [(1, "none"), *((TENSOR_PARALLEL, policy) for policy in ("none", "selective", "full"))],
)
def test_the_formulas_of_the_paper(tensor_parallel: int, policy: str) -> None:
    row = measure(SIZES[0], tensor_parallel, policy)
    assert row.accounted == pytest.approx(row.paper, rel=0.01)
    assert (row.whole > 0) == (policy == "none" and tensor_parallel > 1)
    assert (row.masks > 0) == (policy != "full")
