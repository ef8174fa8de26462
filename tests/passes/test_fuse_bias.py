"""A bias goes back into its linear where nothing came between them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.passes.fuse_bias import FuseBias
from tests.passes.graphs import (
    ATEN,
    LINEAR,
    Forward,
    assert_parity,
    assert_text,
    evaluate,
    random_values,
    text,
)


def affine(
    transposed: bool = False, readers: int = 1, shape: tuple[int, ...] = (6,)
) -> fx.GraphModule:
    """A linear and the add of its bias; with two readers, the product is returned as well."""
    build = Forward()
    w = build.parameter("w", *((8, 6) if transposed else (6, 8)))
    b, x = build.parameter("b", *shape), build.input("x", 4, 8)
    product = build.call(LINEAR, x, w, None, transposed, path="up")
    total = build.call(ATEN.add.Tensor, product, b, path="up")
    return build.done(*(total, product)[:readers])


def test_an_add_of_a_vector_is_fused() -> None:
    gm = affine()
    assert FuseBias().run(gm, None) == 1
    assert_text(
        gm,
        """
%w: f64[6,8] = parameter "w"
%b: f64[6] = parameter "b"
%x: f64[4,8] = input "x"
%linear_default_1: f64[4,6] = msc.linear(%x, %w, %b, False)  # up
return (%linear_default_1,)
""",
    )


@given(st.booleans(), st.sampled_from([1, 2]), st.sampled_from([(6,), (1,), (4, 6), (1, 6)]))
@settings(deadline=None)
def test_numbers_are_kept_and_a_second_run_changes_nothing(
    transposed: bool, readers: int, shape: tuple[int, ...]
) -> None:
    before, gm = (affine(transposed, readers, shape) for _ in range(2))
    assert FuseBias().run(gm, None) == (readers == 1 and shape == (6,))
    after = text(gm)
    assert FuseBias().run(gm, None) == 0
    assert text(gm) == after
    values = random_values(before)
    torch.testing.assert_close(evaluate(gm, values), evaluate(before, values))


def test_a_linear_takes_one_bias() -> None:
    build = Forward()
    w, first = build.parameter("w", 6, 8), build.parameter("first", 6)
    second, x = build.parameter("second", 6), build.input("x", 4, 8)
    y = build.call(ATEN.add.Tensor, build.linear(x, w), first)
    gm = build.done(build.call(ATEN.add.Tensor, y, second))
    assert FuseBias().run(gm, None) == 1
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [LINEAR, ATEN.add.Tensor]


def test_the_bias_of_a_sum_of_linears_goes_to_the_last_one() -> None:
    build = Forward()
    first, second = build.parameter("first", 6, 8), build.parameter("second", 6, 8)
    b, x = build.parameter("b", 6), build.input("x", 4, 8)
    total = build.call(ATEN.add.Tensor, build.linear(x, first), build.linear(x, second))
    gm = build.done(build.call(ATEN.add.Tensor, total, build.call(ATEN.sin.default, b)))
    values = random_values(gm)
    expected = evaluate(gm, values)
    assert FuseBias().run(gm, None) == 1
    gm.graph.lint()
    torch.testing.assert_close(evaluate(gm, values), expected)
    assert_text(
        gm,
        """
%first: f64[6,8] = parameter "first"
%second: f64[6,8] = parameter "second"
%b: f64[6] = parameter "b"
%x: f64[4,8] = input "x"
%linear_default: f64[4,6] = msc.linear(%x, %first)
%sin_default: f64[6] = aten.sin(%b)
%linear_default_2: f64[4,6] = msc.linear(%x, %second, %sin_default, False)
%add_tensor: f64[4,6] = aten.add.Tensor(%linear_default, %linear_default_2)
return (%add_tensor,)
""",
    )


def test_the_bias_of_a_sum_that_is_read_elsewhere_stays() -> None:
    build = Forward()
    first, second = build.parameter("first", 6, 8), build.parameter("second", 6, 8)
    b, x = build.parameter("b", 6), build.input("x", 4, 8)
    total = build.call(ATEN.add.Tensor, build.linear(x, first), build.linear(x, second))
    gm = build.done(build.call(ATEN.add.Tensor, total, b), total)
    assert FuseBias().run(gm, None) == 0


def test_a_scaled_add_is_none() -> None:
    build = Forward()
    w, b, x = build.parameter("w", 6, 8), build.parameter("b", 6), build.input("x", 4, 8)
    gm = build.done(build.call(ATEN.add.Tensor, build.linear(x, w), b, alpha=2))
    assert FuseBias().run(gm, None) == 0


def test_it_runs_on_local_blocks_alone() -> None:
    names = ["forward", "prelude", "prologue", "block0", "block12_1"]
    assert [name for name in names if FuseBias().applies_to(name)] == ["block0", "block12_1"]


def mlp() -> fx.GraphModule:
    build = Forward()
    up, down = build.parameter("up.weight", 16, 8), build.parameter("down.weight", 8, 16)
    up_bias, down_bias = build.parameter("up.bias", 16), build.parameter("down.bias", 8)
    y = build.call(ATEN.add.Tensor, build.linear(build.input("x", 4, 8), up, "up"), up_bias)
    y = build.call(ATEN.relu.default, y)
    y = build.call(ATEN.add.Tensor, build.linear(y, down, "down"), down_bias, path="down")
    return build.done(build.call(ATEN.sum.default, build.call(ATEN.sin.default, y)))


def test_a_bias_behind_a_collective_stays_there() -> None:
    """The second linear's partial sums are added up first; its bias is added once."""
    unit = assert_parity(mlp(), "tp=2")
    fused = [
        len(node.args) > 2 and node.args[2] is not None
        for node in unit.variants[0].local["block0"].gm.graph.nodes
        if node.target is LINEAR
    ]
    assert fused == [True, False]
