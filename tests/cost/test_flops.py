"""FLOPs of one call: against torch's own counter where it counts alike, by hand elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

import msc.ir.ops  # noqa: F401  registers the opaque ops
from msc.cost import call_flops, window_of
from msc.cost.flops import is_gemm, nbytes

ATEN = torch.ops.aten
OPS = torch.ops.msc
LENGTHS = st.integers(1, 5)


def counted(target: Any, *operands: Tensor, **attributes: Any) -> int:
    """FLOPs of a call on real tensors."""
    found = target(*operands, **attributes)
    return call_flops(target, operands, found if isinstance(found, tuple) else (found,))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape)


@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS)
def test_matmuls_count_as_torch_counts(b: int, m: int, k: int, n: int) -> None:
    cases: list[tuple[Any, tuple[Tensor, ...]]] = [
        (ATEN.mm.default, (random(m, k), random(k, n))),
        (ATEN.bmm.default, (random(b, m, k), random(b, k, n))),
        (ATEN.addmm.default, (random(n), random(m, k), random(k, n))),
        (ATEN.linear.default, (random(b, m, k), random(n, k))),
    ]
    for target, operands in cases:
        with FlopCounterMode(display=False) as counter:
            target(*operands)
        assert (
            counted(target, *operands)
            == counter.get_total_flops()
            == 2 * m * k * n * (b if operands[0].dim() == 3 else 1)
        )


@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS, st.booleans())
def test_a_linear_and_its_gradients_count_alike(
    b: int, m: int, k: int, n: int, transposed: bool
) -> None:
    x, gy = random(b, m, k), random(b, m, n)
    w = random(k, n) if transposed else random(n, k)
    expected = 2 * b * m * k * n
    assert counted(OPS.linear.default, x, w, transposed=transposed) == expected
    for target, operands in (
        (OPS.linear_dgrad.default, (gy, w)),
        (OPS.linear_wgrad.default, (gy, x)),
    ):
        result = target(*operands, transposed)
        assert call_flops(target, operands, (result,)) == expected


@given(LENGTHS, st.sampled_from([1, 2]), LENGTHS, LENGTHS, LENGTHS)
def test_attention_counts_the_full_square(b: int, groups: int, s: int, t: int, d: int) -> None:
    q, k, v = random(b, 2, s, d), random(b, groups, t, d), random(b, groups, t, d)
    square = 2 * (b * 2 * s * t * d)
    target = OPS.attention.default
    results = target(q, k, v, None, 1.0, False)
    assert call_flops(target, (q, k, v), results) == 2 * square
    backward = OPS.attention_backward.default
    gradients = (q, k, v)
    assert call_flops(backward, (q, q, k, v), gradients) == 5 * square


def test_causal_attention_is_not_halved() -> None:
    q = random(1, 2, 8, 4)
    target = OPS.attention.default
    found = [call_flops(target, (q, q, q), target(q, q, q, None, 1.0, c)) for c in (False, True)]
    assert found[0] == found[1]


def test_a_window_counts_its_keys() -> None:
    q, k = random(1, 2, 8, 4), random(1, 2, 6, 4)
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target, operands, results, factor in (
        (OPS.attention.default, (q, k, k), (q,), 4),
        (OPS.attention_backward.default, (q, q, k, k), (q, k, k), 10),
    ):
        tensors = [x] * (6 if factor == 10 else 3)
        node = graph.call_function(target, (*tensors, None, 1.0, True, 3))
        assert window_of(node) == 3
        for window, seen in ((3, 3), (7, 6), (0, 6)):
            assert call_flops(target, operands, results, window) == factor * 2 * 8 * seen * 4
    plain = graph.call_function(OPS.attention.default, (x, x, x, None, 1.0, True))
    assert window_of(plain) == window_of(graph.call_function(ATEN.relu.default, (x,))) == 0


def test_the_gradient_of_a_head_makes_the_logits_again() -> None:
    """6 rows, 8 features, a vocabulary of 10; a bias costs no product."""
    x, w, b = random(2, 3, 8), random(10, 8), random(10)
    rows = torch.zeros(2, 3, dtype=torch.int64)
    terms = random(2, 3).double()
    once = 2 * 6 * 8 * 10
    assert call_flops(OPS.linear_nll_terms.default, (x, w, b, rows), (terms, terms)) == once
    known = (x, w, b, rows, terms, terms, terms)
    for results, products in (((x, w, b), 3), ((w,), 2), ((b,), 1), ((x,), 2)):
        found = call_flops(OPS.linear_nll_terms_backward.default, known, results)
        assert found == products * once
    assert is_gemm(OPS.linear_nll_terms_backward.default)


@pytest.mark.parametrize("target", [ATEN.relu.default, ATEN.sin.default, ATEN.clone.default])
def test_what_is_no_gemm_counts_one_per_element(target: Any) -> None:
    assert counted(target, random(3, 4)) == 12
    assert not is_gemm(target)


def test_what_yields_nothing_counts_nothing() -> None:
    assert call_flops(ATEN.relu.default, (random(3),), ()) == 0


def test_gemms_are_known() -> None:
    known = [
        ATEN.mm.default,
        ATEN.linear.default,
        OPS.linear.default,
        OPS.linear_wgrad.default,
        OPS.attention.default,
        OPS.attention_backward.default,
        ATEN.scaled_dot_product_attention.default,
    ]
    assert all(map(is_gemm, known))
    assert not is_gemm(OPS.nll_terms.default)


def test_bytes() -> None:
    assert nbytes(torch.empty(3, 4, dtype=torch.bfloat16)) == 24
    assert nbytes(torch.empty((), dtype=torch.int64)) == 8
    assert nbytes(torch.empty(1, 4).expand(3, 4)) == 48  # what its elements would take
