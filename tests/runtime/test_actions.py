"""Actions of one rank on tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.errors import InputError
from msc.ir.mesh import Mesh
from msc.runtime.actions import LocalActions

SHAPES = [(3, 2), (), (5,)]


def randoms(seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in SHAPES]


def test_coordinate_is_this_ranks() -> None:
    rt = LocalActions(Mesh.parse("pp=2,tp=3"), 4)
    found = [rt.coordinate(axis) for axis in ("pp", "dp", "tp")]
    assert [int(value) for value in found] == [1, 0, 1]
    assert all(value.dtype == torch.int64 and value.shape == () for value in found)
    assert rt.stage_rank(0) == 1


def test_micro_batches_are_views_that_make_up_the_whole() -> None:
    value = torch.arange(12).view(2, 6)
    parts = [LocalActions.micro_batch(value, 1, index, 3) for index in range(3)]
    assert torch.equal(torch.cat(parts, 1), value)
    assert parts[1].data_ptr() == value[:, 2:].data_ptr()


def test_a_batch_that_does_not_split_is_refused() -> None:
    with pytest.raises(InputError) as error:
        LocalActions.micro_batch(torch.zeros(2, 5), 1, 0, 3)
    assert str(error.value) == (
        "Dim 1 of an input has 5 elements on this rank, which 3 micro-batches do not divide "
        "(shape (2, 5))."
    )


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=4))
def test_a_sum_leaves_its_parts_alone(present: list[list[bool]]) -> None:
    """Any parts may be absent; only what an earlier sum made is written to."""
    one = torch.ones(3)
    parts = [[one if there else None for there in row] for row in present]
    total = LocalActions.accumulate(None, parts[0])
    if len(parts) > 1:
        total = LocalActions.accumulate(total, parts[1])
    for row in parts[2:]:
        before = total
        total = LocalActions.accumulate_(total, row)
        assert all(a is b for a, b in zip(before, total, strict=True) if a is not None)
    assert torch.equal(one, torch.ones(3))
    for column, value in enumerate(total):
        count = sum(row[column] for row in present)
        expected = None if count == 0 else count * torch.ones(3)
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


def test_a_bucket_holds_all_values_and_gives_them_back() -> None:
    values = randoms(0)
    bucket = LocalActions.flatten(values)
    assert bucket.shape == (12,)
    views = LocalActions.unflatten(bucket, SHAPES)
    assert all(torch.equal(a, b) for a, b in zip(views, values, strict=True))
    bucket.zero_()
    assert all(not view.any() for view in views)
