"""Raise attention that a model writes as matmul and softmax to `msc.attention`.

    %s = aten.matmul(%q, aten.transpose(%k, -1, -2))       %attention = msc.attention(
    %c = aten.tanh(%s * 0.25 / 50) * 50              ->        %q, %k, %v, None, 0.25, True, 0, 50)
    %p = aten.softmax(%c + %causal, -1)                    %o = getitem(%attention, 0)
    %o = aten.matmul(%p, %v)

Between product and softmax may stand scaling by numbers, a soft cap, and masks: constants that have
a pattern, or that are added and hide no key. Left alone are other masks (padding, a trained bias),
probabilities that something else reads (dropout, outputs), and a softmax in a narrower type than
its operands.

Numerics: may change by rounding; scores of half types stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir.passes import GraphPass
from msc.ir.walks import num_reads
from msc.passes.normalize.masks import MaskPattern
from msc.passes.normalize.raise_attention import (
    Masks,
    emit_attention,
    fits,
    same_groups,
    ungrouped,
)
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    calls,
    named_arguments,
    replace,
    shape_of,
)

_LOW = -1e30
"""A score this low or lower has the probability 0, whatever is added to it."""


@dataclass(frozen=True)
class Hidden:
    """Scores that a low number replaces: where `where` is True (inverted: False)."""

    where: fx.Node
    inverted: bool


@dataclass
class Scores:
    """What stands between `q @ k.T` and its softmax."""

    q: fx.Node
    k: fx.Node
    scale: float = 1.0
    soft_cap: float = 0.0
    added: list[fx.Node] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)


def raise_eager_attention(gm: fx.GraphModule) -> int:
    """Raise every attention that is written as matmul and softmax; returns their number."""
    found = calls(gm, aten.softmax.int)
    if not found:
        return 0
    masks = Masks(gm)
    return sum(_raise(gm, node, masks) for node in found)


def _raise(gm: fx.GraphModule, softmax: fx.Node, masks: Masks) -> bool:
    args = named_arguments(softmax, {"dtype": None})
    if args["dim"] not in (-1, len(shape_of(softmax)) - 1):
        return False
    product = _only_reader(softmax)
    if product is None or product.target is not aten.matmul.default:
        return False
    _, v = _args(product)
    scores = _scores(args["self"], masks)
    if scores is None or not isinstance(v, fx.Node) or not _is_read_as_left(softmax, product):
        return False
    q, k, v = _widened_from(scores.q), _widened_from(scores.k), _widened_from(v)
    narrow = _bits(softmax) < _bits(q)
    if narrow or not _dtype(q) == _dtype(k) == _dtype(v) == _dtype(product):
        return False
    if any(masks.needs_grad(mask) for mask in scores.added):
        return False
    if same_groups(ungrouped(k), ungrouped(v)):
        k, v = ungrouped(k), ungrouped(v)
    if len(shape_of(q)) != 4 or not fits(shape_of(q), shape_of(k), shape_of(v)):
        return False
    emit = Emitter(gm, product)
    found = _masks_of(emit, scores, masks, (shape_of(q)[-2], shape_of(k)[-2]))
    if found is None:
        return False
    pattern, mask = found
    new = emit_attention(emit, q, k, v, mask, scores.scale, pattern, scores.soft_cap)
    replace(product, new)
    return True


def _scores(node: Any, masks: Masks) -> Scores | None:
    """Look through a softmax's operand down to the product; None if it is no attention's."""
    if not isinstance(node, fx.Node) or num_reads(node) != 1 or len(shape_of(node)) != 4:
        return None
    if node.target is aten.matmul.default:
        q, keys = _args(node)
        k = _untransposed(keys)
        return Scores(q, k) if isinstance(q, fx.Node) and k is not None else None
    if node.target is aten.to.dtype:
        (source, *_) = _args(node)
        wider = isinstance(source, fx.Node) and _bits(node) >= _bits(source)
        return _scores(source, masks) if wider else None
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        return _scaled(node, masks)
    if node.target is aten.tanh.default:
        return _capped(node, masks)
    return _masked(node, masks)


def _scaled(node: fx.Node, masks: Masks) -> Scores | None:
    source, number = _args(node)
    if not isinstance(number, (int, float)) or number <= 0:
        return None
    found = _scores(source, masks)
    if found is None or found.added or found.hidden:
        return None
    factor = number if node.target is aten.mul.Tensor else 1 / number
    found.scale *= factor
    found.soft_cap *= factor
    return found


def _capped(node: fx.Node, masks: Masks) -> Scores | None:
    """tanh is a soft cap of 1; a later factor raises it: c * tanh(x) caps scores of c * x at c."""
    found = _scores(node.args[0], masks)
    if found is None or found.added or found.hidden or found.soft_cap:
        return None
    found.soft_cap = 1.0
    return found


def _masked(node: fx.Node, masks: Masks) -> Scores | None:
    if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
        left, right = _args(node)
        for source, mask in ((left, right), (right, left)):
            found = _scores(source, masks) if isinstance(mask, fx.Node) else None
            if found is not None and mask.meta["val"].is_floating_point():
                found.added.append(mask)
                return found
        return None
    if node.target is aten.masked_fill.Scalar:
        source, where, low = _args(node)
        hidden = Hidden(where, inverted=False)
    elif node.target in (aten.where.self, aten.where.ScalarOther):
        where, source, low = _args(node)
        hidden, low = Hidden(where, inverted=True), _number(low, masks)
    else:
        return None
    found = _scores(source, masks) if low <= _LOW else None
    if found is not None:
        found.hidden.append(hidden)
    return found


def _number(low: Any, masks: Masks) -> float:
    """A number, also of a constant of no dims; 0 for what is none."""
    if isinstance(low, fx.Node):
        value = masks.value(low)
        return float(value) if value is not None and value.numel() == 1 else 0.0
    return float(low)


def _masks_of(
    emit: Emitter, scores: Scores, masks: Masks, plane: tuple[int, ...]
) -> tuple[MaskPattern, fx.Node | None] | None:
    """The pattern that masks have, and the sum of constants that hide no key; None for others.

    A query that sees no key weighs all keys alike in these models, where low numbers are finite;
    `msc.attention` gives 0. So each query must see itself, whatever the inputs are.
    """
    found, bias = MaskPattern(), []
    for mask in scores.added:
        pattern = masks.pattern(mask) if shape_of(mask)[-2:] == plane else None
        if pattern is None:
            value = masks.value(mask)
            if value is None or bool((value <= _LOW).any()):
                return None
            bias.append(mask)
        else:
            found = found.intersect(pattern)
    for each in scores.hidden:
        pattern = masks.visible(each.where, each.inverted, plane)
        if pattern is None:
            return None
        found = found.intersect(pattern)
    return found, _sum(emit, bias, masks)


def _sum(emit: Emitter, added: list[fx.Node], masks: Masks) -> fx.Node | None:
    """All masks as one that is added; the same node for the same masks of other layers."""
    total = None
    for count, mask in enumerate(added, 1):
        key = tuple(added[:count])
        if key not in masks.sums:
            masks.sums[key] = mask if total is None else emit(aten.add.Tensor, total, mask)
        total = masks.sums[key]
    return total


def _untransposed(keys: Any) -> fx.Node | None:
    """The `[b, g, t, d]` of which `keys` is the transpose."""
    if not isinstance(keys, fx.Node):
        return None
    (source, *dims) = _args(keys)
    swaps = (
        keys.target is aten.mT.default
        or (keys.target is aten.transpose.int and {d % 4 for d in dims} == {2, 3})
        or (keys.target is aten.permute.default and [d % 4 for d in dims[0]] == [0, 1, 3, 2])
    )
    return source if swaps else None


def _args(node: fx.Node) -> list[Any]:
    return list(node.args)


def _only_reader(node: fx.Node) -> fx.Node | None:
    """What alone reads a value, also through a conversion."""
    while num_reads(node) == 1:
        (node,) = node.users
        if node.target is not aten.to.dtype:
            return node
    return None


def _is_read_as_left(softmax: fx.Node, product: fx.Node) -> bool:
    left = product.args[0]
    while isinstance(left, fx.Node) and left.target is aten.to.dtype:
        left = left.args[0]
    return left is softmax


def _widened_from(x: fx.Node) -> fx.Node:
    """What a value is a wider copy of; the kernel computes in float32 anyway."""
    if x.target is aten.to.dtype:
        source = x.args[0]
        if isinstance(source, fx.Node) and 16 <= _bits(source) < _bits(x) == 32:
            return source
    return x


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _bits(node: fx.Node) -> int:
    dtype = _dtype(node)
    return torch.finfo(dtype).bits if dtype.is_floating_point else 0


@dataclass(frozen=True)
class RaiseEagerAttention(GraphPass):
    """`raise_eager_attention` as a pass."""

    name: ClassVar[str] = "raise-eager-attention"
    numerics: ClassVar[str] = "may change by rounding; scores of half types stay in float32"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Raise every attention that is written as matmul and softmax."""
        return raise_eager_attention(gm)
