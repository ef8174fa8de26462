"""embedding whole and in parts against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import msc.ir.ops  # noqa: F401  registers torch.ops.msc
from msc.ir.errors import InputError

_msc = torch.ops.msc


@pytest.mark.parametrize("padding_idx", [-1, 0, 5])
def test_whole_table_equals_torch(padding_idx: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 8, (4, 6))
    y = _msc.embedding(ids, w, None, padding_idx)
    expected = functional.embedding(ids, w, padding_idx if padding_idx >= 0 else None)
    gy = torch.randn_like(y)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y, w, gy)[0], torch.autograd.grad(expected, w, gy)[0])


@pytest.mark.parametrize("padding_idx", [-1, 0, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_the_table_sum_to_the_whole(size: int, padding_idx: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 8, (4, 6), dtype=torch.int32)
    whole = _msc.embedding(ids, w, None, padding_idx)
    parts = [
        _msc.embedding(ids, part, torch.tensor(index * (8 // size)), padding_idx)
        for index, part in enumerate(w.chunk(size))
    ]
    gy = torch.randn_like(whole)
    assert torch.equal(sum(parts[1:], parts[0]), whole)
    assert torch.equal(
        torch.autograd.grad(sum(parts[1:], parts[0]), w, gy)[0],
        torch.autograd.grad(whole, w, gy)[0],
    )


def test_id_outside_of_the_whole_table_is_an_error() -> None:
    with pytest.raises(
        InputError, match=r"table of 8 rows was asked for row 8\. Ids go from 0 to 7"
    ):
        _msc.embedding(torch.tensor([8]), torch.randn(8, 3))
    part, start = torch.randn(4, 3), torch.tensor(4)
    with pytest.raises(InputError, match=r"for row 8 and for row -1\. Ids"):
        _msc.embedding(torch.tensor([8, -1]), part, start, -1, 8)
