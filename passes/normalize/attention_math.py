"""Attention as matmul and softmax, for what `msc.attention` does not compute."""

from __future__ import annotations

import torch
from torch import fx

from msc.passes.normalize.rewrite import Emitter, aten, shape_of


def attention_math(
    emit: Emitter,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    mask: fx.Node | None,
    scale: float,
    causal: bool,
    window: int,
    dropout_p: float,
) -> fx.Node:
    """softmax(scale * q @ k.T + mask) @ v with plain ops; rows that see no key give 0.

    q `[.., h, s, d]`, k and v `[.., g, t, ..]` with h a multiple of g.
    """
    if len(shape_of(q)) > 2 and shape_of(q)[-3] != shape_of(k)[-3]:
        repeats = shape_of(q)[-3] // shape_of(k)[-3]
        k, v = _repeat_heads(emit, k, repeats), _repeat_heads(emit, v, repeats)
    keys = emit(aten.transpose.int, k, -2, -1)
    scores = emit(aten.mul.Tensor, emit(aten.matmul.default, q, keys), scale)
    if mask is not None and mask.meta["val"].dtype != torch.bool:
        scores = emit(aten.add.Tensor, scores, mask)
        mask = None
    hidden = None if mask is None else emit(aten.logical_not.default, mask)
    if causal:
        outside = _outside(emit, shape_of(scores)[-2:], window)
        hidden = outside if hidden is None else emit(aten.logical_or.default, hidden, outside)
    if hidden is None:
        weights = emit(aten.softmax.int, scores, -1)
    else:
        # Finite, and then cleared: a row without a visible key gives 0 and no NaN.
        lowest = torch.finfo(scores.meta["val"].dtype).min
        scores = emit(aten.masked_fill.Scalar, scores, hidden, lowest)
        weights = emit(aten.softmax.int, scores, -1)
        weights = emit(aten.masked_fill.Scalar, weights, hidden, 0.0)
    if dropout_p > 0.0:
        weights = emit(aten.dropout.default, weights, dropout_p, True, shape=shape_of(weights))
    return emit(aten.matmul.default, weights, v)


def _outside(emit: Emitter, shape: tuple[int, ...], window: int) -> fx.Node:
    """True where a causal mask hides the key."""
    ones = emit(aten.ones.default, list(shape), dtype=torch.bool)
    hidden = emit(aten.triu.default, ones, 1)
    if window:
        before = emit(aten.tril.default, ones, -window)
        hidden = emit(aten.logical_or.default, hidden, before)
    return hidden


def _repeat_heads(emit: Emitter, x: fx.Node, repeats: int) -> fx.Node:
    *outer, g, t, d = shape_of(x)
    split = emit(aten.unsqueeze.default, x, -3)
    wide = emit(aten.expand.default, split, [*outer, g, repeats, t, d])
    return emit(aten.reshape.default, wide, [*outer, g * repeats, t, d])
