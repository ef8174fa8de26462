"""The two terms of cross entropy, so that a vocabulary may be sharded.

Cross entropy of a row is `lse - target_logit` where its target counts. On a rank that holds a part
of the vocabulary both are partial: the logsumexps combine by logsumexp, the target logits by sum.
"""

# Shape letters: v vocabulary (or this rank's part of it), `...` the rows.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from msc.ir.ops.library import compute_dtype, define

_MINUS_INFINITY = float("-inf")

# Logits are the largest tensor of a step. Working through them in blocks of rows keeps every
# temporary small: in the cache of a CPU, and few enough launches on an accelerator.
_CPU_BLOCK_ELEMENTS = 1 << 18
_DEVICE_BLOCK_ELEMENTS = 1 << 26


def nll_terms(
    logits: Tensor, target: Tensor, start: Tensor | int | None = None
) -> tuple[Tensor, Tensor]:
    """logits `[..., v]`, target int64 `[...]` -> lse `[...]`, target_logit `[...]`.

    lse is the logsumexp over v; target_logit the logit of the target. With `start` (0-dim int64)
    the logits are the columns `[start, start + v)` of the vocabulary. A target outside of them,
    such as -100, gives target_logit 0. Half types are computed in float32.

    Both results are float64: their difference is the loss, and logits of a few tens leave float32
    no more than five digits of a small one.
    """
    rows, v = logits.reshape(-1, logits.shape[-1]), logits.shape[-1]
    column, inside = _columns(target, start, v)
    lse = rows.new_empty(rows.shape[0], dtype=torch.float64)
    for block in _row_blocks(rows):
        lse[block] = _logsumexp(rows[block].to(compute_dtype(rows.dtype)))
    picked = rows.gather(1, column.unsqueeze(1)).squeeze(1).double()
    picked.masked_fill_(~inside, 0.0)
    return lse.view(target.shape), picked.view(target.shape)


def _logsumexp(rows: Tensor) -> Tensor:
    """float64 `[rows]`: the maximum is exact, so only the sum of exponentials is rounded."""
    largest = rows.amax(1, keepdim=True)
    finite = largest.masked_fill(largest == _MINUS_INFINITY, 0.0)
    total = (rows - finite).exp_().sum(1)
    return total.double().log_().add_(finite.squeeze(1))


def nll_terms_backward(
    glse: Tensor,
    gtarget: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    start: Tensor | None = None,
) -> Tensor:
    """`glse * softmax(logits)`, plus gtarget at the target: `[..., v]` in the dtype of logits."""
    rows = logits.reshape(-1, logits.shape[-1])
    result = rows.new_empty(rows.shape)
    write_gradient(result, rows, glse, gtarget, target, lse, start)
    return result.view(logits.shape)


def write_gradient(
    result: Tensor,
    rows: Tensor,
    glse: Tensor,
    gtarget: Tensor,
    target: Tensor,
    lse: Tensor,
    start: Tensor | int | None,
) -> None:
    """Write the gradient of logits `rows` `[rows, v]` to `result`, which may be `rows` itself."""
    column, inside = _columns(target, start, rows.shape[1])
    wide = compute_dtype(rows.dtype)
    # A row of logits that is -inf throughout has softmax 0 here, not exp(-inf + inf).
    shift = lse.reshape(-1, 1).masked_fill(lse.reshape(-1, 1) == _MINUS_INFINITY, 0.0).to(wide)
    weight = glse.reshape(-1, 1).to(wide)
    at_target = gtarget.reshape(-1, 1).to(wide).masked_fill(~inside.unsqueeze(1), 0.0)
    for block in _row_blocks(rows):
        direct = result[block] if result.dtype == wide else None
        grad = torch.sub(rows[block].to(wide), shift[block], out=direct)
        grad.exp_().mul_(weight[block])
        grad.scatter_add_(1, column[block].unsqueeze(1), at_target[block])
        if direct is None:
            result[block].copy_(grad)


def _columns(target: Tensor, start: Tensor | int | None, v: int) -> tuple[Tensor, Tensor]:
    """Each row's target as a column of the logits (0 if it is none), and whether it is one."""
    column = target.reshape(-1)
    if start is not None:
        column = column - start
    inside = (column >= 0) & (column < v)
    return column.masked_fill(~inside, 0), inside


def _row_blocks(rows: Tensor) -> Iterator[slice]:
    on_cpu = rows.device.type == "cpu"
    elements = _CPU_BLOCK_ELEMENTS if on_cpu else _DEVICE_BLOCK_ELEMENTS
    step = max(1, elements // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        yield slice(first, first + step)


def _check(logits: Tensor, target: Tensor) -> None:
    if logits.shape[:-1] != target.shape or target.dtype != torch.int64:
        raise ValueError(
            f"nll_terms: logits {tuple(logits.shape)} need a target int64 "
            f"{tuple(logits.shape[:-1])}, not {target.dtype} {tuple(target.shape)}"
        )


def _nll_terms_fake(
    logits: Tensor, target: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check(logits, target)
    return (
        logits.new_empty(target.shape, dtype=torch.float64),
        logits.new_empty(target.shape, dtype=torch.float64),
    )


def _nll_terms_backward_fake(
    glse: Tensor,
    gtarget: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    start: Tensor | None = None,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, start = inputs
    ctx.save_for_backward(logits, target, output[0], start)


def _backward(ctx: Any, glse: Tensor, gtarget: Tensor) -> tuple[Tensor | None, ...]:
    logits, target, lse, start = ctx.saved_tensors
    return NLL_TERMS_BACKWARD(glse, gtarget, logits, target, lse, start), None, None


NLL_TERMS_BACKWARD = define(
    "nll_terms_backward(Tensor glse, Tensor gtarget, Tensor logits, Tensor target, Tensor lse,"
    " Tensor? start=None) -> Tensor",
    nll_terms_backward,
    _nll_terms_backward_fake,
)
NLL_TERMS = define(
    "nll_terms(Tensor logits, Tensor target, Tensor? start=None)"
    " -> (Tensor lse, Tensor target_logit)",
    nll_terms,
    _nll_terms_fake,
    setup=_setup,
    backward=_backward,
)
