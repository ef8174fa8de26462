"""Actions of one rank on tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.errors import InputError
from msc.ir.mesh import Mesh
from msc.runtime.actions import LocalActions
from msc.runtime.adamw import adamw

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


def optimizer_steps(
    parameters: list[torch.Tensor], absent: int | None, steps: int, decay: list[float]
) -> list[torch.Tensor]:
    """torch's own AdamW, tensor by tensor, without any fused or batched kernel."""
    own = [torch.nn.Parameter(value.clone()) for value in parameters]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(own, decay, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6, foreach=False)
    for step in range(steps):
        for index, (value, gradient) in enumerate(zip(own, randoms(10 + step), strict=True)):
            value.grad = None if index == absent else gradient
        optimizer.step()
    return [value.detach() for value in own]


@pytest.mark.parametrize("absent", [None, 0, 2])
def test_adamw_equals_torchs(absent: int | None) -> None:
    parameters, decay = randoms(0), [0.1, 0.0, 0.1]
    expected = optimizer_steps(parameters, absent, 5, decay)
    first, second = ([torch.zeros_like(value) for value in parameters] for _ in range(2))
    for step in range(5):
        gradients: list[torch.Tensor | None] = [*randoms(10 + step)]
        if absent is not None:
            gradients[absent] = None
        number = torch.tensor(step + 1)
        rest = (number, 0.01, (0.8, 0.95), 1e-6, decay)
        found = adamw(parameters, gradients, first, second, *rest)
        assert all(a is b for a, b in zip(found[0], parameters, strict=True))
    torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)


def test_adamw_steps_in_the_moments_precision() -> None:
    """A bfloat16 parameter with float32 moments is rounded once a step, not at each operation."""
    low = randoms(0, torch.bfloat16)
    exact = [value.float() for value in low]
    zeros = [[torch.zeros(shape) for shape in SHAPES] for _ in range(4)]
    rest = (torch.tensor(1), 0.01, (0.9, 0.999), 1e-8, [0.1] * 3)
    adamw(low, randoms(1, torch.bfloat16), zeros[0], zeros[1], *rest)
    adamw(exact, [g.float() for g in randoms(1, torch.bfloat16)], zeros[2], zeros[3], *rest)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(low, exact, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(zeros[0], zeros[2], strict=True))
