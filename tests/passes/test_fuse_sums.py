"""Gradients of one value are summed inside the GEMM that makes the last of them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.codegen.in_place import in_place_calls
from msc.ir.ops.linear import LINEAR_DGRAD, add_linear_dgrad_, linear_dgrad
from msc.passes.fuse_sums import FuseSums
from tests.passes.graphs import ATEN, Forward, assert_text, evaluate, random_values, text


def gradients(count: int, transposed: bool = False, kept: bool = False) -> fx.GraphModule:
    """The sum of `count` input gradients; `kept` returns the last one as well."""
    build = Forward()
    shape = (8, 6) if transposed else (6, 8)
    weights = [build.parameter(f"w{i}", *shape) for i in range(count)]
    given = [build.input(f"g{i}", 4, 6) for i in range(count)]
    total = made = build.call(LINEAR_DGRAD, given[0], weights[0], transposed)
    for gradient, weight in zip(given[1:], weights[1:], strict=True):
        made = build.call(LINEAR_DGRAD, gradient, weight, transposed)
        total = build.call(ATEN.add.Tensor, total, made, path="up")
    return build.done(*([total, made] if kept else [total]))


def test_a_chain_of_sums_becomes_a_chain_of_gemms() -> None:
    gm = gradients(3)
    assert FuseSums().run(gm, None) == 2
    assert_text(
        gm,
        """
%w0: f64[6,8] = parameter "w0"
%w1: f64[6,8] = parameter "w1"
%w2: f64[6,8] = parameter "w2"
%g0: f64[4,6] = input "g0"
%g1: f64[4,6] = input "g1"
%g2: f64[4,6] = input "g2"
%linear_dgrad_default: f64[4,8] = msc.linear_dgrad(%g0, %w0, False)
%linear_dgrad_default_3: f64[4,8] = msc.linear_dgrad(%g1, %w1, False, %linear_dgrad_default)  # up
%linear_dgrad_default_4: f64[4,8] = msc.linear_dgrad(%g2, %w2, False, %linear_dgrad_default_3)  # up
return (%linear_dgrad_default_4,)
""",
    )
    chosen = in_place_calls(gm)
    assert [found for found in chosen.values()] == [(add_linear_dgrad_, 3)] * 2


@given(st.integers(1, 4), st.booleans(), st.booleans())
@settings(deadline=None)
def test_numbers_are_kept(count: int, transposed: bool, kept: bool) -> None:
    before, gm = (gradients(count, transposed, kept) for _ in range(2))
    # a product that somebody else reads stays; the sum before it is then no GEMM's to take either,
    # but where it is a product itself, it takes the kept one
    assert FuseSums().run(gm, None) == (count - 1 if not kept or count == 2 else max(0, count - 2))
    after = text(gm)
    assert FuseSums().run(gm, None) == 0
    assert text(gm) == after
    values = random_values(before)
    for one, other in zip(evaluate(before, values), evaluate(gm, values), strict=True):
        torch.testing.assert_close(one, other)


def test_a_product_that_is_spread_stays() -> None:
    """Its rows are fewer than those of the sum."""
    build = Forward()
    w, g, x = build.parameter("w", 6, 8), build.input("g", 1, 6), build.input("x", 4, 8)
    product = build.call(LINEAR_DGRAD, g, w, False)
    gm = build.done(build.call(ATEN.add.Tensor, x, product))
    assert FuseSums().run(gm, None) == 0


def test_a_total_of_another_layout_is_not_written_to() -> None:
    generator = torch.Generator().manual_seed(0)
    gy, w, total = (torch.randn(s, generator=generator) for s in ((4, 6), (6, 8), (8, 4)))
    expected = linear_dgrad(gy, w) + total.t()
    before = total.clone()
    torch.testing.assert_close(add_linear_dgrad_(total.t(), gy, w), expected)
    assert torch.equal(total, before)
    contiguous = total.t().contiguous()
    assert add_linear_dgrad_(contiguous, gy, w) is contiguous
    torch.testing.assert_close(contiguous, expected)
