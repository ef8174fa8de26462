"""Each op in kernels, in the interpreter, against the function that it replaces."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import msc.ir.ops  # noqa: F401  registers the ops
from msc.codegen.kernel_calls import linear_cross_entropy as head_kernels
from msc.codegen.kernel_calls.call import KernelCall
from msc.codegen.kernel_calls.choice import OPS
from msc.codegen.kernels.description import INTERPRETER, SM_80, SM_90, Target
from msc.ir.errors import PlanError
from msc.ir.ops import linear_loss
from msc.ir.ops.library import KERNELS
from tests.codegen.kernels.fused import error

OP = torch.ops.msc
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def no_fallback(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("kernels were to compute this")


def kernel_call(op: Any, *args: Any, target: Target = INTERPRETER, **kwargs: Any) -> KernelCall:
    return KernelCall("op", "here", OPS[op].maker(target, *args, **kwargs), no_fallback)


def check(
    op: Any, *args: Any, exact: bool = False, target: Target = INTERPRETER, **kwargs: Any
) -> None:
    """Kernels give what the op gives: numbers, shapes, dtypes and strides."""
    found = kernel_call(op, *args, target=target, **kwargs)(*args, **kwargs)
    wanted = KERNELS.get(op, op)(*args, **kwargs)
    several = isinstance(wanted, (tuple, list))
    pairs = zip(found, wanted, strict=True) if several else [(found, wanted)]
    for one, other in pairs:
        if other is None:
            assert one is None
            continue
        layouts = [(x.shape, x.stride(), x.dtype) for x in (one, other)]
        assert layouts[0] == layouts[1]
        if exact:
            assert torch.equal(one, other)
        else:
            assert error(one, other.double()) <= TOLERANCE[args[0].dtype]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_and_its_gradients(transposed: bool, dtype: torch.dtype) -> None:
    x, gy = random(3, 7, 40, dtype=dtype), random(3, 7, 20, dtype=dtype)
    w = random(*((40, 20) if transposed else (20, 40)), dtype=dtype)
    check(OP.linear.default, x, w, None, transposed)
    check(OP.linear.default, x.transpose(0, 1), w, random(20, dtype=dtype), transposed)
    check(OP.linear_dgrad.default, gy, w, transposed)
    check(OP.linear_dgrad.default, gy, w, transposed, random(3, 7, 40, dtype=dtype))
    check(OP.linear_wgrad.default, gy, x, transposed)


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("activation", "keep", "residual"),
    [("gelu", True, False), ("relu", False, True), ("", False, True), ("silu", True, True)],
)
def test_linear_with_an_epilogue(
    activation: str, keep: bool, residual: bool, transposed: bool, dtype: torch.dtype
) -> None:
    x = random(3, 7, 40, dtype=dtype).transpose(0, 1)
    w = random(*((40, 20) if transposed else (20, 40)), dtype=dtype)
    b = random(20, dtype=dtype) if activation else None
    other = random(3, 7, 20, dtype=dtype).transpose(0, 1) if residual else None
    check(OP.linear_epilogue.default, x, w, b, other, activation, keep, transposed)


@DTYPES
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_a_gate_and_its_gradient(activation: str, dtype: torch.dtype) -> None:
    for width in (24, 21):
        gy, gate, up = (random(2, 5, width, dtype=dtype, seed=i) for i in range(3))
        check(OP.gated.default, gate, up, activation)
        halves = random(2, 5, 2 * width, dtype=dtype).chunk(2, -1)
        check(OP.gated.default, *halves, activation)
        check(OP.gated_backward.default, gy, gate, up, activation)
        check(OP.gated_backward.default, gy, *halves, activation)
        check(OP.gated.default, gate.transpose(0, 1), up.transpose(0, 1), activation)


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_products_with_a_gate(keep: bool, transposed: bool, dtype: torch.dtype) -> None:
    x = random(3, 7, 40, dtype=dtype).transpose(0, 1)
    one, two = (random(20, 40, dtype=dtype, seed=i) for i in range(2))
    both = torch.cat([one, two])
    if transposed:
        one, two, both = (weight.t().contiguous() for weight in (one, two, both))
    check(OP.linear_gated.default, x, one, two, "silu", keep, transposed)
    check(OP.linear_gated.default, x, both, None, "gelu", keep, transposed)
    beside = OPS[OP.linear_gated.default].beside
    assert beside is not None
    for weights in ((one, two), (both, None)):
        operands = (x, *weights, "gelu_tanh", keep, transposed)
        call = KernelCall("op", "here", beside(INTERPRETER, *operands), no_fallback)
        for found, wanted in zip(call(*operands), OP.linear_gated(*operands), strict=True):
            assert error(found, wanted.double()) <= TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("width", [24, 4100])
def test_norms_with_the_sums_beside_them(width: int, dtype: torch.dtype) -> None:
    x, residual, gy, other = (random(2, 3, width, dtype=dtype, seed=i) for i in range(4))
    weight, bias = random(width, dtype=dtype), random(width, dtype=dtype, seed=1)
    for shift in (None, bias):
        operands = (x, residual, [width], weight, shift, 1e-5)
        check(OP.add_layer_norm.default, *operands)
        summed, _, mean, rstd = OP.add_layer_norm(*operands)
        known = (gy, summed, [width], mean, rstd, weight, shift)
        backward = OP.layer_norm_backward_add.default
        check(backward, *known, True, shift is not None, other)
        check(backward, *known, False, shift is not None, other)
    check(OP.add_rms_norm.default, x, residual, weight, 1e-5)
    summed, _, rstd = OP.add_rms_norm(x, residual, weight, 1e-5)
    check(OP.rms_norm_backward_add.default, gy, summed, weight, rstd, other)


def test_sums_and_gradients_lie_over_what_they_are_made_of() -> None:
    """As the emitter calls them, where nothing else reads the operand."""
    x, residual, weight = random(6, 24), random(6, 24, seed=1), random(24)
    wanted = OP.add_layer_norm(x, residual, [24], weight, None, 1e-5)
    call = kernel_call(OP.add_layer_norm.default, x, residual, [24], weight, None, 1e-5)
    given = x.clone()
    found = call.overwriting(no_fallback)(given, residual, [24], weight, None, 1e-5)
    assert found[0] is given
    assert all(error(one, other) <= 2e-6 for one, other in zip(found, wanted, strict=True))
    call = kernel_call(OP.add_rms_norm.default, x, residual, weight, 1e-5)
    given = x.clone()
    found = call.overwriting(no_fallback)(given, residual, weight, 1e-5)
    assert found[0] is given
    assert error(given, x + residual) <= 2e-6
    gy, gate, up = (random(6, 24, seed=i) for i in range(3))
    gradients = OP.gated_backward(gy, gate, up, "silu")
    call = kernel_call(OP.gated_backward.default, gy, gate, up, "silu")
    found = call.overwriting(no_fallback)(gy, gate, up, "silu")
    assert found[0] is gy
    assert all(error(one, other) <= 2e-6 for one, other in zip(found, gradients, strict=True))


def test_an_input_gradient_lies_over_what_it_is_summed_with() -> None:
    gy, w, total = random(6, 20), random(20, 40), random(6, 40)
    wanted = total + gy @ w
    call = kernel_call(OP.linear_dgrad.default, gy, w, False, total)
    assert call.overwriting(no_fallback)(total, gy, w, False) is total
    assert error(total, wanted) <= 2e-6
    apart = torch.stack([random(6, 40)] * 2, -1)[..., 0]  # has gaps, and stays what it is
    before = apart.clone()
    found = call.overwriting(no_fallback)(apart, gy, w, False)
    assert error(found, before + gy @ w) <= 2e-6
    assert torch.equal(apart, before)


@DTYPES
@pytest.mark.parametrize(
    ("causal", "window", "soft_cap"),
    [(True, 0, 0.0), (True, 5, 0.0), (False, 0, 0.0), (True, 0, 3.0)],
)
def test_attention_and_its_gradient(
    causal: bool, window: int, soft_cap: float, dtype: torch.dtype
) -> None:
    b, h, g, s, d = 2, 4, 2, 18, 16
    q, gy = (random(b, s, h, d, dtype=dtype, seed=i).transpose(1, 2) for i in range(2))
    k, v = (random(b, g, s, d, dtype=dtype, seed=i) for i in range(2))
    rest = (None, 0.25, causal, window, soft_cap)
    check(OP.attention.default, q, k, v, *rest)
    out, lse = OP.attention(q, k, v, *rest)
    check(OP.attention_backward.default, gy, q, k, v, out, lse, *rest)


@DTYPES
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("width", [24, 4100])
def test_layer_norm_and_its_gradient(width: int, shift: bool, dtype: torch.dtype) -> None:
    aten = torch.ops.aten
    x, gy = (random(2, 3, width, dtype=dtype, seed=i) for i in range(2))
    weight = random(width, dtype=dtype)
    bias = random(width, dtype=dtype) if shift else None
    operands = (x, [width], weight, bias, 1e-5)
    check(aten.native_layer_norm.default, *operands)
    _, mean, rstd = aten.native_layer_norm(*operands)
    backward = aten.native_layer_norm_backward.default
    check(backward, gy, x, [width], mean, rstd, weight, bias, [True, True, shift])
    check(backward, gy, x, [width], mean, rstd, weight, bias, [True, False, False])


@DTYPES
@pytest.mark.parametrize("start", [None, 40])
def test_the_terms_of_cross_entropy_and_their_gradient(
    start: int | None, dtype: torch.dtype
) -> None:
    logits = random(3, 5, 40, dtype=dtype)
    target = torch.tensor([0, 39, 41, -100, 79] * 3).view(3, 5)
    rest = () if start is None else (torch.tensor(start),)
    check(OP.nll_terms.default, logits, target, *rest)
    lse, _ = OP.nll_terms(logits, target, *rest)
    one = torch.tensor(0.5, dtype=torch.float64).expand(3, 5)
    operands = (one, -one, logits, target, lse, *rest)
    found = kernel_call(OP.nll_terms_backward.default, *operands)(*operands)
    assert error(found, OP.nll_terms_backward(*operands)) <= TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize(("start", "soft_cap"), [(None, 0.0), (40, 0.0), (None, 3.0)])
def test_a_head_with_its_loss_and_their_gradient(
    start: int | None, soft_cap: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts of the vocabulary, the last a shorter one."""
    monkeypatch.setattr(linear_loss, "LEAST_COLUMNS", 32)
    monkeypatch.setattr(head_kernels, "CPU_LOGITS_BYTES", 0)
    x, w = random(3, 5, 40, dtype=dtype), random(80, 40, dtype=dtype)
    labels = torch.tensor([0, 79, 81, -100, 119] * 3).view(3, 5)
    rest = (None if start is None else torch.tensor(start), False, soft_cap)
    forward, backward = OP.linear_nll_terms.default, OP.linear_nll_terms_backward.default
    # ATen rounds logits to half types, kernels do not: both are compared with float32
    wide = x.float(), w.float(), None, labels
    found = kernel_call(forward, x, w, None, labels, *rest)(x, w, None, labels, *rest)
    for one, other in zip(found, OP.linear_nll_terms(*wide, *rest), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert error(one, other) <= 2e-6
    weights = random(3, 5).double(), random(3, 5, seed=1).double()
    for wanted in ([True, True, False], [False, True, False], [True, False, False]):
        own = (x, w, None, labels, found[0], *weights, *rest, wanted)
        gradients = kernel_call(backward, *own)(*own)
        exact = OP.linear_nll_terms_backward(*wide, found[0], *weights, *rest, wanted)
        for one, other in zip(gradients, exact, strict=True):
            assert (one.shape, one.dtype) == (other.shape, dtype)
            assert error(one, other.double()) <= TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("part", [False, True])
def test_dropout_has_the_same_bits(part: bool, dtype: torch.dtype) -> None:
    key = OP.rng_key(torch.tensor([3, 11]), 5)
    mine = torch.tensor([1, 4, 6, 7])
    x = random(5, 4, 4 if part else 20, dtype=dtype)
    coordinates = [None, torch.tensor([0, 2, 3, 5]), mine if part else None]
    check(OP.dropout.default, x, 0.3, key, coordinates, [5, 6, 20], exact=True)


@pytest.mark.parametrize("device", [SM_80, SM_90])
def test_the_forms_for_a_device(device: Target) -> None:
    """Tiles, tensor descriptors and statistics as on that device, interpreted all the same."""
    target = dataclasses.replace(device, processors=2)
    dtype = torch.bfloat16
    x, gy, w = (random(*size, dtype=dtype) for size in ((2, 64, 64), (2, 64, 128), (128, 64)))
    check(OP.linear.default, x, w, random(128, dtype=dtype), target=target)
    check(OP.linear_dgrad.default, gy, w, False, x, target=target)
    check(OP.linear_wgrad.default, gy, x[:, :, :63], target=target)  # no rows of 16 bytes
    check(OP.rms_norm.default, x, w[0], 1e-5, target=target)
    _, rstd = OP.rms_norm(x, w[0], 1e-5)
    check(OP.rms_norm_backward.default, x + 1, x, w[0], rstd, target=target)
    q, g = (random(1, 128, 4, 64, dtype=dtype, seed=i).transpose(1, 2) for i in range(2))
    k, v = (random(1, 2, 128, 64, dtype=dtype, seed=i) for i in range(2))
    rest = (None, 0.125, True)
    check(OP.attention.default, q, k, v, *rest, target=target)
    out, lse = OP.attention(q, k, v, *rest)
    check(OP.attention_backward.default, g, q, k, v, out, lse, *rest, target=target)
    aten = torch.ops.aten
    operands = (x, [64], w[0], w[1], 1e-5)
    y, mean, rstd = kernel_call(aten.native_layer_norm.default, *operands, target=target)(*operands)
    assert mean.dtype == rstd.dtype == torch.float32  # as ATen has them on CUDA
    assert error(y, aten.native_layer_norm(*operands)[0].double()) <= TOLERANCE[dtype]
    back = (gy[:, :, :64], x, [64], mean, rstd, w[0], w[1], [True] * 3)
    dx, dw, db = kernel_call(aten.native_layer_norm_backward.default, *back, target=target)(*back)
    leaves = [value.double().requires_grad_() for value in (x, w[0], w[1])]
    wide = torch.nn.functional.layer_norm(leaves[0], (64,), leaves[1], leaves[2])
    grads = torch.autograd.grad(wide, leaves, back[0].double())
    for found, expected in zip((dx, dw, db), grads, strict=True):
        assert error(found, expected) <= TOLERANCE[dtype]


F64 = torch.zeros(4, 16, dtype=torch.float64)
LABELS = torch.zeros(4, dtype=torch.int64)
HEADS = torch.zeros(1, 2, 4, 8)
Q = torch.zeros(1, 2, 4, 16)


@pytest.mark.parametrize(
    ("op", "operands", "reason"),
    [
        (OP.linear.default, (F64, F64), "gemm: no kernel computes on float64"),
        (OP.linear.default, (F64.float(), F64.bfloat16()), "one dtype, not bfloat16 and float32"),
        (OP.attention.default, (Q, Q, Q.half(), None, 1.0, True), "not float16 and float32"),
        (OP.rms_norm_backward.default, (F64.half(), F64, F64[0], F64[:, 0]), "float16 and float64"),
        (OP.linear.default, (torch.zeros(0, 16), torch.zeros(4, 16)), "is empty"),
        (OP.attention.default, (HEADS, HEADS, HEADS, None, 1.0, True), "16 to 256 elements, not 8"),
        (OP.attention.default, (Q, Q, Q, torch.zeros(4, 4), 1.0, True), "this mask is a tensor"),
        (OP.attention.default, (Q, Q[:, :, :3], Q[:, :, :3], None, 1.0, True), "not 3 and 4"),
        (OP.attention.default, (Q, Q, Q.repeat(1, 1, 1, 2), None, 1.0, True), "v have 32"),
        (torch.ops.aten.native_layer_norm.default, (F64, [16], None, None, 1e-5), "has none"),
        (OP.dropout.default, (torch.zeros(()), 0.1, torch.zeros(()), [], []), "there are none"),
        (OP.dropout.default, (Q, 1.0, torch.zeros(()), [None] * 4, Q.shape), "0 <= p < 1"),
        (OP.nll_terms.default, (F64, torch.zeros(4).long()), "no kernel computes on float64"),
        (OP.linear_nll_terms.default, (F64, F64, F64[:, 0], LABELS), "the kernels add no bias"),
        (OP.linear_nll_terms.default, (F64, F64.t(), None, LABELS, None, True), "not .k, v."),
        (OP.linear_nll_terms.default, (F64, F64, None, LABELS), "no kernel computes on float64"),
        (OP.linear_nll_terms.default, (F64[:0], F64, None, LABELS[:0]), "there are no logits"),
    ],
)
def test_what_kernels_do_not_compute(op: Any, operands: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        OPS[op].maker(INTERPRETER, *operands)


@DTYPES
@pytest.mark.parametrize("width", [24, 4100])
def test_rms_norm_and_its_gradient(width: int, dtype: torch.dtype) -> None:
    x, gy = (random(3, 2, width, dtype=dtype, seed=i).transpose(0, 1) for i in range(2))
    weight = random(width, dtype=dtype)
    check(OP.rms_norm.default, x, weight, 1e-5)
    _, rstd = OP.rms_norm(x, weight, 1e-5)
    check(OP.rms_norm_backward.default, gy, x, weight, rstd)
