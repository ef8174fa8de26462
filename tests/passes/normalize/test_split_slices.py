"""Slices that tile a projection become one split; others stay."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.passes.normalize.one_op import normalized, random, targets


def sliced(bounds: list[tuple[int | None, int | None]], bias: bool = False) -> list[str]:
    """The ops of a projection to 6 columns whose parts are squared and summed."""
    torch.manual_seed(0)

    def function(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        y = functional.linear(x, w, b if bias else None)
        return sum((y[..., start:end].pow(2).sum() for start, end in bounds), b.sum())

    return targets(normalized(function, [random(6, 4), random(6)], [random(3, 5, 4)]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 2), (2, 6)],
        [(None, 2), (2, 4), (4, None)],
        [(4, 6), (0, 4)],
        [(None, -4), (-4, -2), (-2, None)],
    ],
)
def test_slices_that_tile_a_projection_are_one_split(
    bounds: list[tuple[int | None, int | None]], bias: bool
) -> None:
    found = sliced(bounds, bias)
    assert found.count("aten.split_with_sizes.default") == 1
    assert found.count("getitem") == len(bounds)
    assert "aten.slice.Tensor" not in found


@pytest.mark.parametrize(
    "bounds", [[(0, 2), (3, 6)], [(0, 3), (2, 6)], [(0, 2), (2, 4)], [(0, 2)], [(0, 4), (0, 6)]]
)
def test_other_slices_stay(bounds: list[tuple[int | None, int | None]]) -> None:
    found = sliced(bounds)
    assert "aten.split_with_sizes.default" not in found
    assert "aten.slice.Tensor" in found


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.randoms())
@settings(deadline=None, max_examples=10)
def test_numbers_are_kept(lengths: list[int], order: object) -> None:
    """`normalized` compares with eager, and runs normalization twice."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    bounds = list(itertools.pairwise(edges))
    order.shuffle(bounds)  # type: ignore[attr-defined]

    def function(w: Tensor, x: Tensor) -> Tensor:
        y = functional.linear(x, w)
        terms = [(i + 1) * y[:, a:b].pow(2).sum() for i, (a, b) in enumerate(bounds)]
        return torch.stack(terms).sum()

    captured = normalized(function, [random(edges[-1], 4)], [random(3, 4)])
    assert targets(captured).count("aten.split_with_sizes.default") == 1
