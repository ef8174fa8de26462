"""The ops that `gpu_check` runs: operands, the op, the same in float64, and torch's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import msc.ir.ops  # noqa: F401  registers the ops
from benchmarks.gpu_references import (
    adamw_float64,
    attention_float64,
    linear_float64,
    nll_float64,
    nll_grad_float64,
    sdpa,
    window_mask,
)
from msc.runtime.adam import adam

OPS = torch.ops.msc
ATEN = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    """Tokens, widths and heads of what is measured; head_dim is hidden / heads."""

    batch: int
    sequence: int
    hidden: int
    wide: int
    heads: int
    groups: int
    vocabulary: int
    parameters: int


LARGE = Sizes(2, 2048, 4096, 16384, 32, 8, 32768, 2**28)
TINY = Sizes(2, 16, 32, 64, 4, 2, 50, 2**12)


@dataclass(frozen=True)
class Case:
    """One op at one size. All functions take no operands, so that only the op is timed.

    expected: the results in float64, computed by other ops; exact: results must equal bit for bit.
    rival: torch's op for the same work; None where torch has none. work: FLOPs, or bytes moved.
    parts: the two things that `run` does at once, one by one: how much of the shorter is hidden.
    note: what else is to be said of it, found after it was timed.
    """

    name: str
    run: Callable[[], Any]
    expected: Callable[[], Any]
    rival: Callable[[], Any] | None
    work: float
    unit: str
    dtype: torch.dtype
    exact: bool = False
    parts: tuple[Callable[[], Any], Callable[[], Any]] | None = None
    note: Callable[[], str] | None = None


class Make:
    """Random operands on one device, the same every time."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers."""
        values = torch.randn(shape, device=self.device, generator=self.generator)
        return values.to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Whole numbers below `high`."""
        return torch.randint(high, shape, device=self.device, generator=self.generator)


def linear_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Forward and the three gradients, with the weight stored either way."""
    shape = (sizes.batch, sizes.sequence)
    x = make.normal(*shape, sizes.hidden, dtype=dtype)
    gy = make.normal(*shape, sizes.wide, dtype=dtype)
    bias = make.normal(sizes.wide, dtype=dtype)
    x_2d, gy_2d = x.flatten(0, 1), gy.flatten(0, 1)
    flops = 2.0 * x_2d.shape[0] * sizes.hidden * sizes.wide
    for transposed in (False, True):
        w = make.normal(sizes.wide, sizes.hidden, dtype=dtype) / math.sqrt(sizes.hidden)
        stored = w.t().contiguous() if transposed else w
        layout = "weight k,n" if transposed else "weight n,k"
        case = functools.partial(Case, work=flops, unit="TFLOP/s", dtype=dtype)
        yield case(
            f"linear, {layout}",
            functools.partial(OPS.linear, x, stored, bias, transposed),
            functools.partial(linear_float64, x, w, bias),
            functools.partial(functional.linear, x, w, bias),
        )
        yield case(
            f"linear_dgrad, {layout}",
            functools.partial(OPS.linear_dgrad, gy, stored, transposed),
            functools.partial(linear_float64, gy, w.t()),
            functools.partial(torch.mm, gy_2d, w),
        )
        yield case(
            f"linear_wgrad, {layout}",
            functools.partial(OPS.linear_wgrad, gy, x, transposed),
            functools.partial(_wgrad_float64, gy_2d, x_2d, transposed),
            functools.partial(torch.mm, gy_2d.t(), x_2d),
        )
    yield Case(
        "linear_bgrad",
        lambda: OPS.linear_bgrad(gy),
        lambda: gy_2d.double().sum(0),
        lambda: gy_2d.sum(0),
        gy.nbytes,
        "GB/s",
        dtype,
    )


def _wgrad_float64(gy_2d: Tensor, x_2d: Tensor, transposed: bool) -> Tensor:
    found = gy_2d.double().t() @ x_2d.double()
    return found.t() if transposed else found


def attention_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Plain, causal, window, grouped and masked; forward and backward."""
    b, s, h, d = sizes.batch, sizes.sequence, sizes.heads, sizes.hidden // sizes.heads
    window = max(2, s // 8)
    additive = make.normal(1, 1, s, s, dtype=torch.float32)
    padding = make.integers(8, b, 1, 1, s) > 0
    padding[..., 0] = True
    variants: list[tuple[str, int, Tensor | None, bool, int]] = [
        ("causal", h, None, True, 0),
        ("causal, grouped heads", sizes.groups, None, True, 0),
        (f"window {window}", h, None, True, window),
        ("full", h, None, False, 0),
        ("bool mask", h, padding, False, 0),
        ("float mask", h, additive, False, 0),
    ]
    for name, groups, mask, causal, reach in variants:
        q, gy = (make.normal(b, h, s, d, dtype=dtype) for _ in range(2))
        k, v = (make.normal(b, groups, s, d, dtype=dtype) for _ in range(2))
        scale = 1 / math.sqrt(d)
        whole: Tensor | None = mask
        if causal and reach:
            whole = window_mask(s, reach, q.device)
        flops = 4.0 * b * h * s * s * d
        arguments = (mask, scale, causal, reach)
        given = (q, k, v, gy, whole, scale, causal)
        out, lse = OPS.attention(q, k, v, *arguments)
        rival = sdpa(q, k, v, gy, whole, scale, causal and not reach)
        yield Case(
            f"attention {name}",
            functools.partial(OPS.attention, q, k, v, *arguments),
            functools.partial(_attention_part, slice(0, 2), *given),
            rival[0],
            flops,
            "TFLOP/s",
            dtype,
        )
        yield Case(
            f"attention_backward {name}",
            functools.partial(OPS.attention_backward, gy, q, k, v, out, lse, *arguments),
            functools.partial(_attention_part, slice(2, 5), *given),
            rival[1],
            2.5 * flops,
            "TFLOP/s",
            dtype,
        )


def _attention_part(part: slice, *given: Any) -> tuple[Tensor, ...]:
    return attention_float64(*given)[part]


def loss_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """The terms of cross entropy, whole and on half of the vocabulary, and their gradient."""
    tokens, v = sizes.batch * sizes.sequence, sizes.vocabulary
    logits = make.normal(tokens, v, dtype=dtype)
    target = make.integers(v, tokens)
    target[::7] = -100
    start = torch.tensor(v // 2, device=make.device)
    half = logits[:, v // 2 :].contiguous()
    glse, gtarget = (make.normal(tokens, dtype=torch.float32) for _ in range(2))
    leaf = logits.detach().requires_grad_()
    loss = functional.cross_entropy(leaf, target)
    part = logits.nbytes
    for name, own, begin in (("", logits, None), (" half of the vocabulary", half, start)):
        lse, _ = OPS.nll_terms(own, target, begin)
        yield Case(
            f"nll_terms{name}",
            functools.partial(OPS.nll_terms, own, target, begin),
            functools.partial(nll_float64, own, target, begin),
            (lambda: functional.cross_entropy(logits, target)) if begin is None else None,
            part if begin is None else part / 2,
            "GB/s",
            dtype,
        )
        yield Case(
            f"nll_terms_backward{name}",
            functools.partial(OPS.nll_terms_backward, glse, gtarget, own, target, lse, begin),
            functools.partial(nll_grad_float64, glse, gtarget, own, target, begin),
            (lambda: torch.autograd.grad(loss, leaf, retain_graph=True)) if begin is None else None,
            2 * part if begin is None else part,
            "GB/s",
            dtype,
        )


def optimizer_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """One AdamW step of many parameters; the moments are float32."""
    shape = (sizes.parameters // 8,)
    wide = torch.float32
    p, g = ([make.normal(*shape, dtype=dtype) for _ in range(8)] for _ in range(2))
    m = [make.normal(*shape, dtype=wide) for _ in range(8)]
    v = [make.normal(*shape, dtype=wide).abs() for _ in range(8)]
    before = [x[: 2**20].clone().double() for x in (p[0], g[0], m[0], v[0])]
    rivals = [x.clone().requires_grad_() for x in p]
    for rival, gradient in zip(rivals, g, strict=True):
        rival.grad = gradient
    optimizer = torch.optim.AdamW(rivals, lr=1e-3, weight_decay=0.1, fused=True)

    def step() -> Any:
        # in place: only the first of the steps is compared
        rest = (torch.tensor(3), 1e-3, (0.9, 0.999), 1e-8, 0.1, True)
        parameters, (first, _) = adam(p, g, (m, v), *rest)
        return [parameters[0][: 2**20].clone(), first[0][: 2**20].clone()]

    moved = sum(x.nbytes for x in (*p, *g, *p, *m, *m, *v, *v))
    # torch keeps moments in the dtype of the parameters: the same work in float32 alone
    rival_step = optimizer.step if dtype == wide else None
    expected = functools.partial(adamw_float64, *before)
    yield Case("adamw", step, expected, rival_step, moved, "GB/s", dtype)


def dropout_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """The same bits as on the CPU, and a rank's part of them."""
    shape = [sizes.batch, sizes.sequence, sizes.hidden]
    x = make.normal(*shape, dtype=dtype)
    key = OPS.rng_key(torch.tensor([5, 7]), 3)
    columns = torch.arange(1, sizes.hidden, 2)
    half = x[..., : sizes.hidden // 2].contiguous()
    for name, own, coordinates in (
        ("whole", x, [None, None, None]),
        ("every other column", half, [None, None, columns]),
    ):
        here = [None if c is None else c.to(make.device) for c in coordinates]
        yield Case(
            f"dropout {name}",
            functools.partial(OPS.dropout, own, 0.1, key.to(make.device), here, shape),
            functools.partial(OPS.dropout, own.cpu(), 0.1, key, coordinates, shape),
            functools.partial(functional.dropout, own, 0.1, training=True),
            2 * own.nbytes,
            "GB/s",
            dtype,
            exact=True,
        )


def embedding_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Rows of a table and their gradient, whole and of a rank's rows."""
    v, width = sizes.vocabulary, sizes.hidden
    ids = make.integers(v, sizes.batch, sizes.sequence)
    w, gy = make.normal(v, width, dtype=dtype), make.normal(*ids.shape, width, dtype=dtype)
    start = torch.tensor(v // 4, device=make.device)
    rows = v // 2
    inside = (ids >= v // 4) & (ids < v // 4 + rows)
    for name, own, begin in (("", w, None), (" part", w[v // 4 : v // 4 + rows], start)):
        kept = torch.ones_like(inside) if begin is None else inside
        count, shift = own.shape[0], 0 if begin is None else v // 4
        yield Case(
            f"embedding{name}",
            functools.partial(OPS.embedding, ids, own, begin, 5),
            functools.partial(_rows_float64, w, ids, kept),
            lambda: functional.embedding(ids, w),
            2 * gy.nbytes,
            "GB/s",
            dtype,
            exact=True,
        )
        yield Case(
            f"embedding_wgrad{name}",
            functools.partial(OPS.embedding_wgrad, gy, ids, begin, count, 5),
            functools.partial(_table_float64, gy, ids - shift, kept & (ids != 5), count),
            lambda: ATEN.embedding_dense_backward(gy, ids, v, 5, False),
            gy.nbytes + own.nbytes,
            "GB/s",
            dtype,
        )


def _rows_float64(w: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    return w.double()[ids] * kept.unsqueeze(-1)


def _table_float64(gy: Tensor, local: Tensor, used: Tensor, count: int) -> Tensor:
    table = torch.zeros(count, gy.shape[-1], dtype=torch.float64, device=gy.device)
    return table.index_add_(0, local[used], gy[used].double())


def copy_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """What the device's memory gives at best: the measure of all GB/s."""
    source = make.normal(sizes.parameters // 4, dtype=dtype)
    target = torch.empty_like(source)
    yield Case(
        "copy",
        lambda: target.copy_(source),
        lambda: source.double(),
        source.clone,
        2 * source.nbytes,
        "GB/s",
        dtype,
        exact=True,
    )


FAMILIES = (
    linear_cases,
    attention_cases,
    loss_cases,
    copy_cases,
    optimizer_cases,
    dropout_cases,
    embedding_cases,
)
"""The most important first."""
