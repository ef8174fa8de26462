"""Raise cross entropy to `msc.nll_terms`, masks and sums.

    %loss: f32[] = aten.cross_entropy_loss(%logits, %target)
        ->   %valid: bool[32] = aten.ne.Scalar(%target, -100)
             %lse, %logit = msc.nll_terms(%logits, %target)
             %terms: f32[32] = aten.where.ScalarOther(%valid, %lse - %logit, 0.0)
             %loss: f32[] = aten.div.Tensor(aten.sum(%terms), aten.to.dtype(aten.sum(%valid), f32))

so that the vocabulary can be sharded, and the count of labels is a value of its own, which depends
on no parameter. `log_softmax` followed by `nll_loss` is raised alike.

Numerics: may change by rounding; losses of half types are summed in float32.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.passes import GraphPass
from msc.ir.torch_private import new_fake
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    calls,
    mode_of,
    named_arguments,
    replace,
    shape_of,
)

_NONE, _MEAN, _SUM = 0, 1, 2
_NLL = (aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
_LOG_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)
_DEFAULTS = {"weight": None, "reduction": _MEAN, "ignore_index": -100, "label_smoothing": 0.0}


def raise_cross_entropy(gm: fx.GraphModule) -> int:
    """Raise every cross entropy and negative log likelihood; returns their number."""
    found = calls(gm, aten.cross_entropy_loss.default, *_NLL)
    for node in found:
        args = named_arguments(node, dict(_DEFAULTS))
        emit = Emitter(gm, node)
        target = args["target"]
        if target.meta["val"].is_floating_point():
            new = _with_probabilities(emit, args)
        else:
            new = _with_classes(emit, args, likelihood=node.target in _NLL)
        dtype = node.meta["val"].dtype
        if new.meta["val"].dtype != dtype:
            new = emit(aten.to.dtype, new, dtype, shape=shape_of(node), like=node)
        replace(node, new)
    return len(found)


def _with_classes(emit: Emitter, args: dict[str, Any], likelihood: bool) -> fx.Node:
    """Cross entropy against class numbers, or the likelihood of log probabilities."""
    scores = _classes_last(emit, args["self"])
    target, weight, smoothing = args["target"], args["weight"], args["label_smoothing"]
    valid = emit(aten.ne.Scalar, target, args["ignore_index"])
    source = _softmaxed(args["self"]) if likelihood else None
    if likelihood and source is None:
        terms = _likelihood(emit, scores, target, valid)
    else:
        if source is not None:
            scores = _classes_last(emit, source)
        terms = _cross_entropy(emit, scores, target, valid, weight, smoothing)
    counted = valid
    if weight is not None:
        safe = emit(aten.where.ScalarOther, valid, target, 0)
        per_row = emit(aten.index.Tensor, weight, [safe])
        per_row = counted = emit(aten.where.ScalarOther, valid, per_row, 0.0)
        if smoothing == 0.0 or likelihood:
            terms = emit(aten.mul.Tensor, terms, per_row)
        else:
            terms = _smoothed_weighted(emit, scores, terms, per_row, weight, valid, smoothing)
    terms = emit(aten.where.ScalarOther, valid, terms, 0.0)
    terms = _mark_impossible(emit, terms, target, valid, shape_of(scores)[-1])
    return _reduce(emit, terms, counted, args["reduction"])


def _mark_impossible(
    emit: Emitter, terms: fx.Node, target: fx.Node, valid: fx.Node, num_classes: int
) -> fx.Node:
    """Make the loss NaN where a label that counts is no class, for which torch raises."""
    below = emit(aten.lt.Scalar, target, 0)
    above = emit(aten.ge.Scalar, target, num_classes)
    outside = emit(aten.bitwise_or.Tensor, below, above)
    impossible = emit(aten.bitwise_and.Tensor, outside, valid)
    return emit(aten.masked_fill.Scalar, terms, impossible, float("nan"), shape=shape_of(terms))


def _cross_entropy(
    emit: Emitter,
    logits: fx.Node,
    target: fx.Node,
    valid: fx.Node,
    weight: fx.Node | None,
    smoothing: float,
) -> fx.Node:
    """Each row's `lse - logit of the target`, smoothed if there are no class weights."""
    lse, picked = _nll_terms(emit, logits, target)
    shape = shape_of(lse)
    if smoothing == 0.0 or weight is not None:
        return emit(aten.sub.Tensor, lse, picked, shape=shape)
    mean = emit(aten.mean.dim, _wide(emit, logits), [-1])
    sharp = emit(aten.mul.Tensor, picked, 1.0 - smoothing, shape=shape)
    expected = emit(aten.add.Tensor, sharp, emit(aten.mul.Tensor, mean, smoothing), shape=shape)
    return emit(aten.sub.Tensor, lse, expected, shape=shape)


def _smoothed_weighted(
    emit: Emitter,
    logits: fx.Node,
    terms: fx.Node,
    per_row: fx.Node,
    weight: fx.Node,
    valid: fx.Node,
    smoothing: float,
) -> fx.Node:
    """(1 - e) * w[target] * nll + e / v * sum over classes of w * nll."""
    num_classes = shape_of(logits)[-1]
    log_probabilities = emit(aten.log_softmax.int, _wide(emit, logits), -1)
    spread = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, log_probabilities, weight), [-1])
    sharp = emit(aten.mul.Tensor, emit(aten.mul.Tensor, terms, per_row), 1.0 - smoothing)
    return emit(aten.sub.Tensor, sharp, emit(aten.mul.Tensor, spread, smoothing / num_classes))


def _nll_terms(emit: Emitter, logits: fx.Node, target: fx.Node) -> tuple[fx.Node, fx.Node]:
    gm = emit.gm
    if target.meta["val"].dtype != torch.int64:
        target = emit(aten.to.dtype, target, torch.int64)
    shape = shape_of(logits)[:-1]
    fakes = tuple(new_fake(mode_of(gm), shape, torch.float64) for _ in range(2))
    with gm.graph.inserting_before(emit.anchor):
        pair = gm.graph.call_function(torch.ops.msc.nll_terms.default, (logits, target))
        parts = [gm.graph.call_function(operator.getitem, (pair, index)) for index in range(2)]
    origin = {key: value for key, value in emit.anchor.meta.items() if key != "val"}
    pair.meta = {**origin, "val": fakes}
    for part, fake in zip(parts, fakes, strict=True):
        part.meta = {**origin, "val": fake}
    return parts[0], parts[1]


def _likelihood(emit: Emitter, scores: fx.Node, target: fx.Node, valid: fx.Node) -> fx.Node:
    safe = emit(aten.where.ScalarOther, valid, target, 0)
    column = emit(aten.unsqueeze.default, safe, -1)
    picked = emit(aten.squeeze.dim, emit(aten.gather.default, scores, -1, column), -1)
    return emit(aten.neg.default, picked)


def _with_probabilities(emit: Emitter, args: dict[str, Any]) -> fx.Node:
    """Cross entropy against class probabilities: -sum(p * log_softmax) over the classes."""
    logits, target = args["self"], args["target"]
    class_dim = 1 if len(shape_of(logits)) > 1 else 0
    num_classes = shape_of(logits)[class_dim]
    smoothing, reduction = args["label_smoothing"], args["reduction"]
    if smoothing:
        sharp = emit(aten.mul.Tensor, target, 1.0 - smoothing)
        target = emit(aten.add.Tensor, sharp, smoothing / num_classes)
    if args["weight"] is not None:
        shape = [1] * len(shape_of(logits))
        shape[class_dim] = num_classes
        target = emit(aten.mul.Tensor, target, emit(aten.reshape.default, args["weight"], shape))
    logs = emit(aten.log_softmax.int, logits, class_dim)
    product = emit(aten.mul.Tensor, logs, target)
    terms = emit(aten.neg.default, emit(aten.sum.dim_IntList, product, [class_dim]))
    if reduction == _NONE:
        return terms
    total = emit(aten.sum.default, terms)
    count = terms.meta["val"].numel()
    return total if reduction == _SUM else emit(aten.div.Tensor, total, count)


def _reduce(emit: Emitter, terms: fx.Node, counted: fx.Node, reduction: int) -> fx.Node:
    """The rows' terms, their sum, or their mean over what is counted (labels, or weights)."""
    if reduction == _NONE:
        return terms
    total = emit(aten.sum.default, terms, shape=())
    if reduction == _SUM:
        return total
    count = emit(aten.sum.default, counted)
    if count.meta["val"].dtype != total.meta["val"].dtype:
        count = emit(aten.to.dtype, count, total.meta["val"].dtype, shape=(), like=total)
    return emit(aten.div.Tensor, total, count, shape=())


def _classes_last(emit: Emitter, scores: fx.Node) -> fx.Node:
    """`[n, v, d1, ..]` as `[n, d1, .., v]`."""
    dims = len(shape_of(scores))
    if dims <= 2:
        return scores
    return emit(aten.permute.default, scores, [0, *range(2, dims), 1])


def _softmaxed(scores: fx.Node) -> fx.Node | None:
    """What `scores` is the log softmax of, over the classes; None if it is none."""
    if scores.target not in _LOG_SOFTMAX:
        return None
    source, dim = scores.args[:2]
    assert isinstance(source, fx.Node)
    assert isinstance(dim, int)
    dims = len(shape_of(scores))
    classes = 1 if dims > 1 else 0
    same_dtype = source.meta["val"].dtype == scores.meta["val"].dtype
    return source if dim % dims == classes and same_dtype else None


def _wide(emit: Emitter, x: fx.Node) -> fx.Node:
    dtype = x.meta["val"].dtype
    wide = _wide_dtype(dtype)
    return x if wide == dtype else emit(aten.to.dtype, x, wide)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True)
class RaiseCrossEntropy(GraphPass):
    """`raise_cross_entropy` as a pass."""

    name: ClassVar[str] = "raise-cross-entropy"
    numerics: ClassVar[str] = "may change by rounding; losses of half types are summed in float32"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Raise every cross entropy."""
        return raise_cross_entropy(gm)
