"""Dropout by counter: reproducible, independent of sharding, and statistically what it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msc.ir.ops import random as module
from msc.ir.placement import Shard, shard_of
from msc.ir.torch_private import FakeTensorMode

_msc = torch.ops.msc


def key(seed: int = 1, step: int = 2, instance: int = 3) -> Tensor:
    result: Tensor = _msc.rng_key(torch.tensor([seed, step]), instance)
    return result


def kept(p: float, at: Tensor, *shape: int) -> Tensor:
    x = torch.ones(shape, dtype=torch.float64)
    mask: Tensor = _msc.dropout(x, p, at, [None] * len(shape), list(shape)) != 0
    return mask


def reference_hash(at: int, index: int) -> int:
    """splitmix64 in Python's integers, as a signed number."""
    wrap = (1 << 64) - 1
    z = (at + (index + 1) * 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    z ^= z >> 31
    return z - (1 << 64) if z >= 1 << 63 else z


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(0.0, 1.0, exclude_max=True))
@settings(deadline=None, max_examples=50)
def test_mask_is_the_published_hash(at: int, p: float) -> None:
    mask = kept(p, torch.tensor(at), 2, 5)
    expected = [(reference_hash(at, index) + (1 << 63)) / 2**64 >= p for index in range(10)]
    assert mask.flatten().tolist() == expected


def test_indices_beyond_32_bits() -> None:
    """Two corners of a whole of 2**40 elements, as one rank would hold them."""
    rows = torch.tensor([0, (1 << 20) - 1])
    x = torch.ones(2, 1 << 10, dtype=torch.float64)
    columns = torch.arange(1 << 10) + (1 << 20) - (1 << 10)
    mask = _msc.dropout(x, 0.5, key(), [rows, columns], [1 << 20, 1 << 20]) != 0
    at = int(key())
    for row, column in [(0, 0), (1, 7), (1, (1 << 10) - 1)]:
        index = int(rows[row]) * (1 << 20) + int(columns[column])
        assert bool(mask[row, column]) == (reference_hash(at, index) >= 0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(p: float) -> None:
    count = 1 << 20
    mask = kept(p, key(), 1 << 10, 1 << 10).double()
    sigma = math.sqrt(p * (1 - p))
    # Four standard deviations of the mean of `count` draws, for the mask and for its correlation
    # with the next element, row and instance.
    bound = 4 * sigma / math.sqrt(count)
    assert abs(mask.mean() - (1 - p)) < bound
    centred = (mask - (1 - p)) / sigma
    other = (kept(p, key(instance=4), 1 << 10, 1 << 10).double() - (1 - p)) / sigma
    for product in (
        centred[:, 1:] * centred[:, :-1],
        centred[1:] * centred[:-1],
        centred * other,
    ):
        assert abs(product.mean()) < 4 / math.sqrt(product.numel())
    # The means of the rows vary as those of independent draws do.
    assert mask.mean(1).std() * math.sqrt(1 << 10) == pytest.approx(sigma, rel=0.1)


def test_values_and_gradients_are_scaled() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    y = _msc.dropout(x, 0.25, key(), [None, None], [64, 64])
    mask = kept(0.25, key(), 64, 64)
    torch.testing.assert_close(y, torch.where(mask, x / 0.75, 0.0), rtol=1e-15, atol=0)
    (gx,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    torch.testing.assert_close(gx, torch.where(mask, 4.0, 0.0).double(), rtol=1e-15, atol=0)


def test_probabilities_0_and_1() -> None:
    x = torch.full((3, 4), float("nan"))
    assert torch.equal(_msc.dropout(x, 1.0, key(), [None] * 2, [3, 4]), torch.zeros(3, 4))
    x = torch.randn(3, 4)
    assert torch.equal(_msc.dropout(x, 0.0, key(), [None] * 2, [3, 4]), x)


def test_every_part_of_the_key_matters() -> None:
    keys = {
        int(key(seed, step, instance))
        for seed in (0, 1, 2, -1)
        for step in (0, 1, 2, 1 << 40)
        for instance in range(8)
    }
    assert len(keys) == 4 * 4 * 8
    assert not torch.equal(kept(0.5, key(1, 2, 3), 64), kept(0.5, key(1, 3, 2), 64))


@st.composite
def shardings(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """A shape and, for each dim, the (size, segments) of the axes that shard it, major to minor."""
    shape, axes = [], []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 3))
        chosen: list[tuple[int, int]] = []
        for _ in range(draw(st.integers(0, 2))):
            size, segments = draw(st.integers(1, 3)), draw(st.integers(1, 2))
            chosen.append((size, segments))
            length *= size * segments
        shape.append(length)
        axes.append(chosen)
    return shape, axes


@given(shardings(), st.data(), st.sampled_from([1, 6, 1 << 16]))
@settings(deadline=None, max_examples=100)
def test_a_shard_drops_what_the_whole_drops(
    case: tuple[list[int], list[list[tuple[int, int]]]], data: st.DataObject, block: int
) -> None:
    shape, axes = case
    x = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(shape)
    whole = _msc.dropout(x, 0.5, key(), [None] * len(shape), shape)
    coordinates: list[Tensor | None] = []
    for dim, chosen in enumerate(axes):
        ranks = [data.draw(st.integers(0, size - 1)) for size, _ in chosen]
        for (size, segments), rank in zip(chosen, ranks, strict=True):
            x = shard_of(x, Shard(dim, segments), size, rank)
            whole = shard_of(whole, Shard(dim, segments), size, rank)
        indices = [torch.tensor(rank) for rank in ranks]
        sizes, runs = [size for size, _ in chosen], [segments for _, segments in chosen]
        found = _msc.global_coordinates(shape[dim], indices, sizes, runs)
        coordinates.append(found if chosen else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_BLOCK_ELEMENTS", block)
        part = _msc.dropout(x, 0.5, key(), coordinates, shape)
    assert torch.equal(part, whole)


def test_coordinates_of_segments() -> None:
    # [a b c d | e f g h] over 2 ranks, each run by itself; then each half over 2 more.
    first = _msc.global_coordinates(8, [torch.tensor(1)], [2], [2])
    assert first.tolist() == [2, 3, 6, 7]
    both = _msc.global_coordinates(8, [torch.tensor(1), torch.tensor(0)], [2, 2], [2, 1])
    assert both.tolist() == [2, 3]


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"a part \(4, 3\) of \(4, 3\), but x is \(2, 3\)"):
        _msc.dropout(x, 0.5, key(), [None, None], [4, 3])
    with FakeTensorMode():
        with pytest.raises(ValueError, match="an axis has no index"):
            _msc.global_coordinates(8, [None], [2], [1])
        with pytest.raises(ValueError, match=r"rng is int64 \[2\]"):
            _msc.rng_key(torch.zeros(3, dtype=torch.int64), 0)
