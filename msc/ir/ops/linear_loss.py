"""A linear head with the terms of its cross entropy: all logits are never in memory at once.

Logits of a part of the vocabulary are made for all rows, used, and overwritten by those of the next
part; the gradient makes them again (Wijmans et al., "Cut your losses in large-vocabulary language
models", ICLR 2025, section 4). Parts are columns and not rows: the logsumexp of a row over all of
them is known when the gradient is taken, so each row of the weight's gradient comes of one product,
as without parts, and only the gradient of x, which is much smaller, is summed over parts.
"""

# Shape letters: `...` the rows, m their number, k input features, v vocabulary (or this rank's part
# of it), p the columns of one part.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from msc.ir.ops.library import compute_dtype, define
from msc.ir.ops.loss import nll_terms, write_gradient

CPU_LOGITS_BYTES = 1 << 24
DEVICE_LOGITS_BYTES = 1 << 28
"""Bytes of logits that are in memory at once: enough for products at full speed."""

LEAST_COLUMNS = 128
"""A part has a multiple of so many columns, however many rows there are."""


def columns_at_once(rows: int, itemsize: int, budget: int) -> int:
    """The columns of a part: so many that logits of `rows` rows take at most `budget` bytes."""
    fitting = budget // max(1, rows * itemsize)
    return max(LEAST_COLUMNS, fitting // LEAST_COLUMNS * LEAST_COLUMNS)


def linear_nll_terms(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    start: Tensor | None = None,
    transposed: bool = False,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`nll_terms(linear(x, w, b, transposed), labels, start)`: lse and target_logit, float64 [...].

    x `[..., k]` with one dim of rows at least, w `[v, k]` (transposed: `[k, v]`), b `[v]`, labels
    int64 `[...]`. With soft_cap c > 0 a logit l becomes `c * tanh(l / c)`, in float32 for half
    types. Otherwise logits have the dtype of x, and what is computed of them that of `nll_terms`.
    """
    head = _Head(x, w, b, transposed)
    target = labels.reshape(-1)
    lse = x.new_full(target.shape, float("-inf"), dtype=torch.float64)
    target_logit = torch.zeros_like(lse)
    for part in head.parts():
        logits = head.logits(part)
        if soft_cap:
            logits = _tanh(logits, soft_cap).mul_(soft_cap)
        own_lse, own_target_logit = nll_terms(logits, target, _first_column(part, start))
        lse = torch.logaddexp(lse, own_lse)
        target_logit.add_(own_target_logit)
    return lse.view(labels.shape), target_logit.view(labels.shape)


def linear_nll_terms_backward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    glse: Tensor,
    gtarget: Tensor,
    start: Tensor | None,
    transposed: bool,
    soft_cap: float,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of x, w and b that are wanted, in this order.

    The gradient of x is summed over parts in float32 for half types.
    """
    head = _Head(x, w, b, transposed)
    target = labels.reshape(-1)
    wide = compute_dtype(x.dtype)
    dx = head.rows.new_zeros(head.rows.shape, dtype=wide) if wanted[0] else None
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if wanted[1] else None
    db = w.new_empty(head.v) if wanted[2] else None
    for part in head.parts():
        gradient = head.logits(part)
        logits, slope = gradient, None
        if soft_cap:
            slope = _tanh(gradient, soft_cap)
            logits = slope * soft_cap
        first = _first_column(part, start)
        write_gradient(logits, logits, glse, gtarget, target, lse, first)
        if slope is not None:  # of tanh: one minus its square
            gradient.copy_(logits.mul_(slope.square_().neg_().add_(1.0)))
        if dx is not None and dx.dtype == x.dtype:
            dx.addmm_(gradient, head.weight(part))
        elif dx is not None:
            dx.add_(torch.mm(gradient, head.weight(part)))
        if dw is not None:
            torch.mm(gradient.t(), head.rows, out=_rows_of(dw, part, transposed))
        if db is not None:
            torch.sum(gradient, 0, out=db[part])
    found = (None if dx is None else dx.to(x.dtype).view(x.shape), dw, db)
    return [each for each in found if each is not None]


class _Head:
    """The parts of a head, whose logits take turns in one piece of memory."""

    def __init__(self, x: Tensor, w: Tensor, b: Tensor | None, transposed: bool) -> None:
        self.rows = x.reshape(-1, x.shape[-1])
        self.w = w
        self.b = b
        self.transposed = transposed
        self.v = w.shape[1 if transposed else 0]
        budget = CPU_LOGITS_BYTES if x.device.type == "cpu" else DEVICE_LOGITS_BYTES
        rows = self.rows.shape[0]
        self.columns = min(self.v, columns_at_once(rows, x.element_size(), budget))
        self.space = x.new_empty(rows * self.columns)

    def parts(self) -> Iterator[slice]:
        """Runs of columns that cover the vocabulary."""
        for first in range(0, self.v, self.columns):
            yield slice(first, min(first + self.columns, self.v))

    def weight(self, part: slice) -> Tensor:
        """The rows of the head of a part: a view `[p, k]`."""
        return _rows_of(self.w, part, self.transposed)

    def logits(self, part: slice) -> Tensor:
        """`[m, p]`, over those of the part before."""
        shape = self.rows.shape[0], part.stop - part.start
        logits = self.space[: shape[0] * shape[1]].view(shape)
        if self.b is None:
            return torch.mm(self.rows, self.weight(part).t(), out=logits)
        return torch.addmm(self.b[part], self.rows, self.weight(part).t(), out=logits)


def _rows_of(w: Tensor, part: slice, transposed: bool) -> Tensor:
    return w[:, part].t() if transposed else w[part]


def _tanh(logits: Tensor, soft_cap: float) -> Tensor:
    return logits.to(compute_dtype(logits.dtype)).div(soft_cap).tanh_()


def _first_column(part: slice, start: Tensor | None) -> Tensor | int:
    """The column of the whole vocabulary that a part begins with."""
    first: int = part.start
    return first if start is None else start + first


def _check(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, transposed: bool, soft_cap: float
) -> None:
    k, v = w.shape if transposed else reversed(w.shape)
    fits = x.dim() > 1 and x.shape[-1] == k and (b is None or tuple(b.shape) == (v,))
    if not fits or labels.shape != x.shape[:-1] or labels.dtype != torch.int64:
        raise ValueError(
            f"linear_nll_terms: x {tuple(x.shape)}, w {tuple(w.shape)} (transposed={transposed}), "
            f"b {None if b is None else tuple(b.shape)} and labels {labels.dtype} "
            f"{tuple(labels.shape)} do not fit together"
        )
    if {each.dtype for each in (x, w, b) if each is not None} != {x.dtype}:
        raise ValueError("linear_nll_terms: x, w and b have several dtypes")
    if soft_cap < 0:
        raise ValueError(f"linear_nll_terms: soft_cap is {soft_cap}; 0 is none, others are above")


def _linear_nll_terms_fake(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    start: Tensor | None = None,
    transposed: bool = False,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _check(x, w, b, labels, transposed, soft_cap)
    lse = x.new_empty(labels.shape, dtype=torch.float64)
    return lse, torch.empty_like(lse)


def _linear_nll_terms_backward_fake(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    glse: Tensor,
    gtarget: Tensor,
    start: Tensor | None,
    transposed: bool,
    soft_cap: float,
    wanted: Sequence[bool],
) -> list[Tensor]:
    found = zip((x, w, b), wanted, strict=True)
    return [each.new_empty(each.shape) for each, is_wanted in found if is_wanted]  # type: ignore[union-attr]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, b, labels, start, ctx.transposed, ctx.soft_cap = inputs
    ctx.wanted = ctx.needs_input_grad[:3]
    ctx.save_for_backward(x, w, b, labels, output[0], start)


def _backward(ctx: Any, glse: Tensor, gtarget: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.wanted)
    options = ctx.transposed, ctx.soft_cap, wanted
    *known, start = ctx.saved_tensors
    found = iter(LINEAR_NLL_TERMS_BACKWARD(*known, glse, gtarget, start, *options))
    gradients = [next(found) if is_wanted else None for is_wanted in wanted]
    return *gradients, None, None, None, None


LINEAR_NLL_TERMS_BACKWARD = define(
    "linear_nll_terms_backward(Tensor x, Tensor w, Tensor? b, Tensor labels, Tensor lse,"
    " Tensor glse, Tensor gtarget, Tensor? start, bool transposed, float soft_cap, bool[3] wanted)"
    " -> Tensor[]",
    linear_nll_terms_backward,
    _linear_nll_terms_backward_fake,
)
LINEAR_NLL_TERMS = define(
    "linear_nll_terms(Tensor x, Tensor w, Tensor? b, Tensor labels, Tensor? start=None,"
    " bool transposed=False, float soft_cap=0.0) -> (Tensor lse, Tensor target_logit)",
    linear_nll_terms,
    _linear_nll_terms_fake,
    setup=_setup,
    backward=_backward,
)
