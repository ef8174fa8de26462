"""Shapes of fused collectives, what one rank computes of them, and how parts make a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from msc.ir.ops.collectives import simulate
from msc.ir.ops.fused_collectives import (
    ALL_GATHER_MATMUL,
    MATMUL_REDUCE_SCATTER,
    from_parts,
    into_parts,
    part_shape,
    product,
    products,
)
from msc.ir.ops.linear import linear, linear_wgrad
from msc.ir.torch_private import FakeTensorMode


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(2, 4), st.data())
def test_parts_are_what_the_collectives_move(
    shape: Sequence[int], size: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shards = [floats(*shape) + rank for rank in range(size)]
    whole = simulate("all_gather", shards, dim=dim, runs=[shape[dim]])[0]
    torch.testing.assert_close(from_parts(torch.cat(shards), shape, dim, size), whole)
    assert part_shape(whole.shape, dim, size) == tuple(shape)
    # dim 0 of what is scattered holds the parts one after the other
    parts = into_parts(whole, dim, size).chunk(size)
    for part, shard in zip(parts, shards, strict=True):
        torch.testing.assert_close(part.view(shard.shape), shard)


def test_results_come_in_order_and_shapes_are_known_beforehand() -> None:
    x, w, v, b = floats(2, 3, 4), floats(5, 4), floats(4, 6), floats(5)
    other = floats(2, 6, 7)
    whole = torch.cat([x, x], 1)
    found = products(whole, [w, v], [b, None], [False, True], [other, other], [True, False], True)
    expected = [
        linear(whole, w, b),
        linear(whole, v, None, True),
        linear_wgrad(whole, other),
        linear_wgrad(other, whole),
        whole,
    ]
    torch.testing.assert_close(found, expected)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(each) for each in (x, w, v, b, other)]
        fake = ALL_GATHER_MATMUL(
            given[0],
            1,
            [given[1], given[2]],
            [given[3], None],
            [False, True],
            [given[4], given[4]],
            [True, False],
            True,
            2,
            "tp",
        )
        part = MATMUL_REDUCE_SCATTER(given[0], given[1], given[3], False, 0, 2, "tp")
    assert [each.shape for each in fake] == [each.shape for each in expected]
    assert all(each.is_contiguous() for each in fake)
    assert part.shape == (1, 3, 5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_adds_a_bias_or_a_sum(transposed: bool) -> None:
    x, w = floats(2, 3, 4), floats(4, 5) if transposed else floats(5, 4)
    plain = linear(x, w, None, transposed)
    torch.testing.assert_close(product(x, w, None, transposed), plain)
    torch.testing.assert_close(product(x, w, floats(5), transposed), plain + floats(5))
    torch.testing.assert_close(product(x, w, floats(2, 3, 5), transposed), plain + floats(2, 3, 5))


BAD: list[tuple[Any, tuple[Any, ...], str]] = [
    (ALL_GATHER_MATMUL, (2, [], [], [], [], [], True, 2, "tp"), "is no dim of rows"),
    (ALL_GATHER_MATMUL, (0, [(5, 3)], [None], [False], [], [], False, 2, "tp"), "do not fit"),
    (ALL_GATHER_MATMUL, (0, [], [], [], [(3, 3, 7)], [True], False, 2, "tp"), "have the rows"),
    (MATMUL_REDUCE_SCATTER, ((5, 4), None, False, 1, 2, "tp"), "that 2 ranks divide"),
    (MATMUL_REDUCE_SCATTER, ((5, 4), (3,), False, 0, 2, "tp"), "neither a bias"),
    (MATMUL_REDUCE_SCATTER, ((5, 4), None, True, 0, 2, "tp"), "do not fit"),
]


@pytest.mark.parametrize(("op", "rest", "message"), BAD)
def test_what_does_not_fit_is_refused(op: Any, rest: tuple[Any, ...], message: str) -> None:
    with FakeTensorMode():

        def tensor(each: Any) -> Any:
            if isinstance(each, tuple):
                return torch.empty(each)
            return list(map(tensor, each)) if isinstance(each, list) else each

        with pytest.raises(ValueError, match=message):
            op(torch.empty(2, 3, 4), *map(tensor, rest))


def test_one_process_alone_is_told_so() -> None:
    with pytest.raises(RuntimeError, match="runs only inside an executor"):
        MATMUL_REDUCE_SCATTER(floats(2, 4), floats(5, 4), None, False, 0, 2, "tp")
