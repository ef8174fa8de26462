"""How each op of a joint graph runs on ranks that hold parts of its operands.

Forward and backward ops alike: the graph was differentiated before anything was sharded. A rule
takes values and returns values; it may communicate through `whole` and `take` alone. What has no
rule here runs on whole values on every rank, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.oracle import shapes
from tests.oracle.values import Value, reduced, take, whole

aten = torch.ops.aten
msc = torch.ops.msc

Rule = Callable[..., "Value | tuple[Value, ...] | None"]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def _last(value: Value) -> bool:
    return value.dim == len(value.shape) - 1


def _contract(left: Value, right: Value, dims: tuple[int, int]) -> tuple[Value, Value]:
    """Operands of a product over `dims`, both sharded there if one is."""
    ld, rd = dims[0] % len(left.shape), dims[1] % len(right.shape)
    if left.dim == ld and not (right.dim == rd and left.same_shard(right)):
        right = take(whole(right), rd, left.indices)
    elif right.dim == rd and left.dim != ld:
        left = take(whole(left), ld, right.indices)
    return left, right


@rule(msc.linear.default)
def linear(x: Value, w: Value, b: Value | None = None, transposed: bool = False) -> Value | None:
    """y = x w^T: the rows of w are columns of y; what is contracted leaves terms of a sum."""
    if b is not None:
        return None
    return _product(reduced(x), reduced(w), 0 if transposed else 1)


@rule(msc.linear_dgrad.default)
def linear_dgrad(gy: Value, w: Value, transposed: bool = False) -> Value | None:
    """dx = gy w, where the rows of w are contracted."""
    return _product(reduced(gy), reduced(w), 1 if transposed else 0)


def _product(x: Value, w: Value, contracted: int) -> Value | None:
    """x times a matrix, summed over x's last dim and the matrix' dim `contracted`."""
    free = 1 - contracted
    if w.dim == free:  # weights stay where they are
        x = whole(x)
    x, w = _contract(x, w, (-1, contracted))

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return left @ (right.T if contracted == 1 else right)

    if _last(x):
        return x.map(multiply, w, partial=True)
    if w.dim == free:
        return x.map(multiply, w, dim=len(x.shape) - 1, indices=w.indices)
    return x.map(multiply, w, dim=x.dim, indices=x.indices)


@rule(msc.linear_wgrad.default)
def linear_wgrad(gy: Value, x: Value, transposed: bool = False) -> Value | None:
    """dw = gy^T x: sharded like the output's columns or the input's, or a sum over samples."""
    gy, x = reduced(gy), reduced(x)

    def multiply(gradient: Tensor, operand: Tensor) -> Tensor:
        product = gradient.flatten(0, -2).T @ operand.flatten(0, -2)
        return product.T if transposed else product

    if _last(gy):
        return gy.map(multiply, whole(x), dim=int(transposed), indices=gy.indices)
    if _last(x):
        return whole(gy).map(multiply, x, dim=1 - int(transposed), indices=x.indices)
    if gy.dim is not None or x.dim is not None:
        dim = gy.dim if gy.dim is not None else x.dim
        assert dim is not None
        gy, x = _contract(gy, x, (dim, dim))
        return gy.map(multiply, x, partial=True)
    return gy.map(multiply, x)


@rule(msc.embedding.default)
def embedding(ids: Value, w: Value, start: None = None, padding_idx: int = -1) -> Value | None:
    """Rows that a rank lacks are zero there, so that the ranks' results add up."""
    ids = whole(ids)
    if w.dim == 1:
        return ids.map(lambda i, t: t[i], w, dim=len(ids.shape), indices=w.indices)
    if w.dim is None:
        return ids.map(lambda i, t: t[i], w)
    parts = []
    for rank in w.ranks:
        match = ids.parts[rank][..., None] == w.indices[rank]
        parts.append(match.to(w.parts[rank].dtype) @ w.parts[rank])
    return Value(tuple(parts), partial=True)


@rule(msc.embedding_wgrad.default)
def embedding_wgrad(
    gy: Value, ids: Value, start: None, num_rows: int, padding_idx: int = -1
) -> Value | None:
    """Every token's gradient added to its row."""
    if padding_idx >= 0:
        return None
    gy, ids = reduced(gy), whole(ids)
    if gy.dim is not None and not _last(gy):
        gy = whole(gy)

    def add(gradient: Tensor, index: Tensor) -> Tensor:
        rows = torch.zeros(num_rows, gradient.shape[-1], dtype=gradient.dtype)
        return rows.index_add(0, index.flatten(), gradient.reshape(-1, gradient.shape[-1]))

    return gy.map(add, ids, dim=1 if gy.dim is not None else None, indices=gy.indices)


def _heads(q: Value, k: Value, v: Value) -> bool:
    """Whether each rank has the keys and values of its query heads, and those alone."""
    if not (q.dim == k.dim == v.dim == 1 and k.same_shard(v)):
        return False
    repeat = q.shape[1] // k.shape[1]
    return all(
        torch.equal(i // repeat, j.repeat_interleave(repeat))
        for i, j in zip(q.indices, k.indices, strict=True)
    )


def _attend(q: Value, k: Value, scale: float, causal: bool, window: int) -> list[Tensor]:
    """Probabilities of every rank's heads, from first principles."""
    found = []
    for query, key in zip(q.parts, k.parts, strict=True):
        repeat = query.shape[1] // key.shape[1]
        scores = scale * query @ key.repeat_interleave(repeat, 1).mT
        i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        hidden = (j > i) if causal else torch.zeros_like(j > i)
        if window:
            hidden |= i - window >= j
        found.append(scores.masked_fill(hidden, -torch.inf))
    return found


@rule(msc.attention.default)
def attention(
    q: Value,
    k: Value,
    v: Value,
    mask: None,
    scale: float,
    causal: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Value, ...] | None:
    """Heads are independent of each other."""
    if mask is not None or soft_cap or not _heads(q, k, v):
        return None
    scores = _attend(q, k, scale, causal, window)
    out, lse = [], []
    for score, value in zip(scores, v.parts, strict=True):
        repeat = score.shape[1] // value.shape[1]
        out.append(score.softmax(-1) @ value.repeat_interleave(repeat, 1))
        lse.append(score.logsumexp(-1))
    return Value(tuple(out), 1, q.indices), Value(tuple(lse), 1, q.indices)


@rule(msc.attention_backward.default)
def attention_backward(
    gradient: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    mask: None,
    scale: float,
    causal: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Value, ...] | None:
    """The gradients of softmax attention, head by head."""
    if mask is not None or soft_cap or not _heads(q, k, v):
        return None
    if not gradient.same_shard(q) or gradient.dim != 1:
        gradient = take(whole(gradient), 1, q.indices)
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for rank, score in enumerate(_attend(q, k, scale, causal, window)):
        g, query = gradient.parts[rank], q.parts[rank]
        repeat = score.shape[1] // k.parts[rank].shape[1]
        key, value = (t.parts[rank].repeat_interleave(repeat, 1) for t in (k, v))
        p = score.softmax(-1)
        dp = g @ value.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        grads[0].append(ds @ key)
        for target, expanded in ((grads[1], ds.mT @ query), (grads[2], p.mT @ g)):
            batch, heads, *rest = expanded.shape
            grouped = expanded.reshape(batch, heads // repeat, repeat, *rest)
            target.append(grouped.sum(2))
    return tuple(
        Value(tuple(parts), 1, like.indices) for parts, like in zip(grads, (q, k, v), strict=True)
    )


def _one_hot(target: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    return (target[..., None] == index).to(dtype)


@rule(msc.nll_terms.default)
def nll_terms(logits: Value, target: Value, start: None = None) -> tuple[Value, ...] | None:
    """Over a sharded vocabulary: a log-sum-exp of the ranks', and the sum of what they find."""
    if not _last(logits):
        return None
    target = whole(target)
    lse = torch.stack([part.logsumexp(-1) for part in logits.parts]).logsumexp(0)
    found = [
        (part * _one_hot(t, index, part.dtype)).sum(-1)
        for part, t, index in zip(logits.parts, target.parts, logits.indices, strict=True)
    ]
    return Value(tuple(lse.clone() for _ in logits.ranks)), Value(tuple(found), partial=True)


@rule(msc.nll_terms_backward.default)
def nll_terms_backward(
    g_lse: Value, g_target: Value, logits: Value, target: Value, lse: Value, start: None = None
) -> Value | None:
    """softmax times one gradient, plus the other one where the target is."""
    if not _last(logits):
        return None
    others = [whole(value) for value in (g_lse, g_target, target, lse)]
    parts = []
    for rank, part in enumerate(logits.parts):
        first, second, ids, total = (value.parts[rank] for value in others)
        hot = _one_hot(ids, logits.indices[rank], part.dtype)
        parts.append((part - total[..., None]).exp() * first[..., None] + hot * second[..., None])
    return Value(tuple(parts), logits.dim, logits.indices)


@rule(aten.view.default, aten.reshape.default)
def view(x: Value, shape: list[int]) -> Value | None:
    return shapes.view(x, shape)


@rule(aten.transpose.int)
def transpose(x: Value, first: int, second: int) -> Value:
    count = len(x.shape)
    swap = {first % count: second % count, second % count: first % count}
    dim = None if x.dim is None else swap.get(x.dim, x.dim)
    how = {"dim": dim, "indices": x.indices, "partial": x.partial}
    return x.map(lambda part: part.transpose(first, second), **how)


@rule(aten.split.Tensor)
def split(x: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    length = x.shape[dim]
    starts = range(0, length, size)
    return tuple(shapes.window(x, dim, s, min(s + size, length)) for s in starts)


@rule(aten.slice.Tensor)
def slice_(
    x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value | None:
    if step != 1:
        return None
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return shapes.window(x, dim, first, last)


@rule(aten.cat.default)
def cat(values: list[Value], dim: int = 0) -> Value | None:
    return shapes.join(values, dim)


@rule(aten.sum.dim_IntList)
def sum_(x: Value, dims: list[int], keepdim: bool = False) -> Value:
    """Over a sharded dim, the ranks' sums are terms of the whole sum."""
    gone = {dim % len(x.shape) for dim in dims}
    partial = x.partial or x.dim in gone
    dim: int | None = None
    if x.dim is not None and x.dim not in gone:
        dim = x.dim if keepdim else x.dim - sum(d < x.dim for d in gone)
    indices = x.indices if dim is not None else ()
    how = {"dim": dim, "indices": indices, "partial": partial}
    return x.map(lambda part: part.sum(dims, keepdim), **how)
