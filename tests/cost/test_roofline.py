"""Seconds of one call: FLOPs, bytes, the launch floor, and what runs no kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import msc.ir.ops  # noqa: F401  registers the opaque ops
from msc.cost import Cluster
from msc.cost.roofline import Work, op_work, streamed_work

ATEN = torch.ops.aten
OPS = torch.ops.msc
CLUSTER = Cluster(
    "unit", 1e6, 1e3, 1e9, 8, 1e3, 1e3, launch_s=1e-4, dtype_flops_per_s={"float64": 1e3}
)


def work(target: Any, *operands: Tensor, rest: tuple[Any, ...] = ()) -> Work:
    found = target(*operands, *rest)
    return op_work(target, operands, found if isinstance(found, (tuple, list)) else (found,))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_slower_of_flops_and_bytes_counts() -> None:
    found = work(ATEN.mm.default, meta(10, 20), meta(20, 30))
    assert (found.flops, found.memory_bytes) == (12_000, 4 * (200 + 600 + 300))
    assert found.seconds(CLUSTER) == pytest.approx(4.4)
    in_double = work(
        ATEN.mm.default, meta(10, 20, dtype=torch.float64), meta(20, 30, dtype=torch.float64)
    )
    assert in_double.seconds(CLUSTER) == pytest.approx(12.0)


def test_a_measured_efficiency_slows_gemms_alone() -> None:
    half = Cluster("half", 1e3, 1e12, 1e9, 8, 1, 1, launch_s=0, gemm_efficiency=0.5)
    assert work(ATEN.mm.default, meta(10, 20), meta(20, 30)).seconds(half) == pytest.approx(24.0)
    assert work(ATEN.relu.default, meta(250)).seconds(half) == pytest.approx(2000 / 1e12)


def test_no_kernel_is_shorter_than_its_launch() -> None:
    assert work(ATEN.relu.default, meta(1)).seconds(CLUSTER) == pytest.approx(8e-3)
    fast = Cluster("fast", 1e15, 1e15, 1e9, 8, 1, 1, launch_s=1e-4)
    assert work(ATEN.relu.default, meta(1)).seconds(fast) == 1e-4


@pytest.mark.parametrize(
    ("target", "operand", "rest", "free"),
    [
        (ATEN.view.default, meta(4, 6), ([24],), True),
        (ATEN._unsafe_view.default, meta(4, 6), ([24],), True),
        (ATEN.transpose.int, meta(4, 6), (0, 1), True),
        (ATEN.split_with_sizes.default, meta(4, 6), ([2, 2],), True),
        (ATEN.reshape.default, meta(4, 6), ([24],), True),
        (ATEN.reshape.default, meta(4, 6).t(), ([24],), False),
        (ATEN.reshape.default, meta(2, 3, 4, 5).transpose(1, 2), ([2, 4, 15],), False),
        (ATEN.reshape.default, meta(2, 4, 3, 5).transpose(2, 3)[:, :, 0], ([8, 3],), True),
        (ATEN.contiguous.default, meta(4, 6), (), True),
        (ATEN.contiguous.default, meta(4, 6).t(), (), False),
        (ATEN.to.dtype, meta(4, 6), (torch.float32,), True),
        (ATEN.to.dtype, meta(4, 6), (torch.bfloat16,), False),
        (ATEN.clone.default, meta(4, 6), (), False),
    ],
)
def test_views_are_free(target: Any, operand: Tensor, rest: tuple[Any, ...], free: bool) -> None:
    assert work(target, operand, rest=rest).launched != free


def test_a_lookup_reads_the_rows_that_it_returns() -> None:
    ids, table = meta(5, dtype=torch.int64), meta(1000, 4)
    for found in (
        work(ATEN.embedding.default, table, ids),
        work(torch.ops.msc.embedding.default, ids, table),
    ):
        assert found.memory_bytes == 5 * 8 + 2 * 5 * 4 * 4
        assert found.dtype is None


def test_an_optimizer_reads_and_writes() -> None:
    assert streamed_work([meta(10)] * 4, [meta(10)] * 3).seconds(CLUSTER) == pytest.approx(0.28)


def test_a_head_with_its_loss_computes_in_the_dtype_of_its_operands() -> None:
    """Its terms are float64, on which no product is made."""
    x, w = (meta(size, 8, dtype=torch.bfloat16) for size in (6, 10))
    labels, terms = meta(6, dtype=torch.int64), meta(6, dtype=torch.float64)
    forward = op_work(OPS.linear_nll_terms.default, (x, w, labels), (terms, terms))
    known = (x, w, labels, terms, terms, terms)
    backward = op_work(OPS.linear_nll_terms_backward.default, known, (x, w))
    assert (forward.dtype, backward.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (forward.flops, backward.flops) == (2 * 6 * 8 * 10, 3 * 2 * 6 * 8 * 10)
