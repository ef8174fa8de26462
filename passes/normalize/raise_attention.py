"""Raise scaled dot-product attention to `msc.attention`, masks that are constants to attributes.

    %mask: bool[8,1,4,4] = ...  # from arange, no input     %attention = msc.attention(
    %k2 = reshape(expand(unsqueeze(%k, 2), ..), ..)     ->      %q, %k, %v, None, 0.25, True)
    %o = aten.scaled_dot_product_attention(                 %o = getitem(%attention, 0)
        %q, %k2, %v2, %mask)

Repeated key-value heads are read grouped. Of a mask that is the `and` of several, those that are
constants become attributes and the others stay a mask. What `msc.attention` does not compute
becomes matmul and softmax: a mask with a gradient, value heads of another size, dropout of the
probabilities.

Numerics: may change by rounding; a mask of the smallest float counts as -inf.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.passes import GraphPass
from msc.ir.torch_private import new_fake
from msc.passes.normalize.attention_math import attention_math
from msc.passes.normalize.input_free import InputFree
from msc.passes.normalize.masks import MaskPattern, recognize
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    calls,
    mode_of,
    named_arguments,
    needing_grad,
    replace,
    shape_of,
)

_ANDS = {aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default}
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


def raise_attention(gm: fx.GraphModule) -> int:
    """Raise every scaled dot-product attention; returns their number."""
    found = calls(gm, aten.scaled_dot_product_attention.default)
    if not found:
        return 0
    masks = Masks(gm)
    for node in found:
        _raise(gm, node, masks)
    return len(found)


class Masks:
    """What is known of the masks of a graph; each is looked at once.

    sums: the masks that a pass has made, by the masks that they are the sum of.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._free = InputFree(gm)
        self._grads = needing_grad(gm)
        self._patterns: dict[fx.Node, MaskPattern | None] = {}
        self.sums: dict[tuple[fx.Node, ...], fx.Node] = {}

    def pattern(self, mask: fx.Node) -> MaskPattern | None:
        """The pattern of a mask that is a constant; None if it is none, or has no pattern."""
        if mask not in self._patterns:
            value = self._free.value(mask)
            self._patterns[mask] = None if value is None else recognize(value)
        return self._patterns[mask]

    def split(
        self, emit: Emitter, mask: fx.Node, plane: tuple[int, ...]
    ) -> tuple[MaskPattern, fx.Node | None]:
        """What the constant parts of a mask over `plane` (s, t) say, and a mask of all others.

        A bool mask that is the `and` of several has these as its parts.
        """
        found, rest = self._parts(mask, plane)
        if rest == [mask]:
            return MaskPattern(), mask
        left = rest[0] if rest else None
        for part in rest[1:]:
            left = emit(aten.logical_and.default, left, part)
        return found, left

    def _parts(self, mask: fx.Node, plane: tuple[int, ...]) -> tuple[MaskPattern, list[fx.Node]]:
        pattern = self.pattern(mask)
        if pattern == MaskPattern() or (pattern is not None and shape_of(mask)[-2:] == plane):
            return pattern, []
        found, rest = MaskPattern(), []
        for part in _conjuncts(mask):
            inner, left = self._parts(part, plane) if part is not mask else (found, [mask])
            found = found.intersect(inner)
            rest += left
        return found, rest

    def visible(self, where: fx.Node, inverted: bool, plane: tuple[int, ...]) -> MaskPattern | None:
        """The pattern of a constant that is True (inverted: False) where a key is hidden."""
        value = self._free.value(where) if shape_of(where)[-2:] == plane else None
        return None if value is None else recognize(value.bool() ^ (not inverted))

    def value(self, mask: fx.Node) -> torch.Tensor | None:
        """The numbers of a mask that is a constant, at batch size 2; None if it is none."""
        return self._free.value(mask)

    def needs_grad(self, mask: fx.Node) -> bool:
        """Whether training changes the mask."""
        return mask in self._grads


def _conjuncts(mask: fx.Node) -> list[fx.Node]:
    """The two bool masks of which a mask is the `and`; itself if it is of none."""
    if mask.target not in _ANDS:
        return [mask]
    parts = [part for part in mask.args if isinstance(part, fx.Node)]
    planes = len(parts) == 2 and all(len(shape_of(part)) >= 2 for part in parts)
    return parts if planes and all(_dtype(part) == torch.bool for part in parts) else [mask]


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _raise(gm: fx.GraphModule, node: fx.Node, masks: Masks) -> None:
    args = named_arguments(
        node,
        {
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        },
    )
    emit = Emitter(gm, node)
    q, k, v, mask = args["query"], args["key"], args["value"], args["attn_mask"]
    scale = args["scale"] if args["scale"] is not None else 1 / math.sqrt(shape_of(q)[-1])
    pattern = MaskPattern(args["is_causal"])
    if mask is not None:
        pattern, mask = masks.split(emit, mask, (shape_of(q)[-2], shape_of(k)[-2]))
    grouped_k, grouped_v = ungrouped(k), ungrouped(v)
    if args["enable_gqa"] or same_groups(grouped_k, grouped_v):
        k, v = grouped_k, grouped_v
    plain = args["dropout_p"] == 0.0 and (mask is None or not masks.needs_grad(mask))
    causal, window = pattern.causal, pattern.window
    if plain and fits(shape_of(q), shape_of(k), shape_of(v)):
        new = emit_attention(emit, q, k, v, mask, float(scale), pattern)
    else:
        new = attention_math(emit, q, k, v, mask, float(scale), causal, window, args["dropout_p"])
    replace(node, new)


def fits(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
    """Whether `msc.attention` computes these shapes: [b,h,s,d] and twice [b,g,t,d]."""
    if not len(q) == len(k) == len(v) or len(q) not in (3, 4):
        return False
    heads = len(q) == 3 or q[1] % k[1] == 0
    return heads and k == v and q[0] == k[0] and q[-1] == k[-1]


def emit_attention(
    emit: Emitter,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    mask: fx.Node | None,
    scale: float,
    pattern: MaskPattern,
    soft_cap: float = 0.0,
) -> fx.Node:
    """`msc.attention` of operands of 3 or 4 dims that fit; its `out`."""
    flat = len(shape_of(q)) == 3
    if flat:  # [b, s, d]: one head
        q, k, v = (emit(aten.unsqueeze.default, x, 1, shape=_one_head(x)) for x in (q, k, v))
        if mask is not None and len(shape_of(mask)) == 3:
            mask = emit(aten.unsqueeze.default, mask, 1, shape=_one_head(mask))
    attributes: tuple[Any, ...] = (scale, pattern.causal, pattern.window, soft_cap)
    while attributes[-1] == 0 and len(attributes) > 2:  # as tracing drops trailing defaults
        attributes = attributes[:-1]
    mode = mode_of(emit.gm)
    b, h, s, d = shape_of(q)
    with emit.gm.graph.inserting_before(emit.anchor):
        pair = emit.gm.graph.call_function(
            torch.ops.msc.attention.default, (q, k, v, mask, *attributes)
        )
        out = emit.gm.graph.call_function(operator.getitem, (pair, 0))
    dtype = q.meta["val"].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    lse = new_fake(mode, (b, h, s), torch.float32 if half else dtype)
    origin = {key: value for key, value in emit.anchor.meta.items() if key != "val"}
    pair.meta = {**origin, "val": (new_fake(mode, (b, h, s, d), dtype), lse)}
    out.meta = {**origin, "val": new_fake(mode, (b, h, s, d), dtype)}
    return emit(aten.squeeze.dim, out, 1, shape=(b, s, d)) if flat else out


def _one_head(x: fx.Node) -> tuple[int, ...]:
    b, *rest = shape_of(x)
    return (b, 1, *rest)


def ungrouped(x: fx.Node) -> fx.Node:
    """The `[b, g, t, d]` of which `x` repeats each head; `x` itself if it repeats none."""
    if x.target is aten.repeat_interleave.self_int:
        source, _, *dims = x.args
        assert isinstance(source, fx.Node)
        dim = dims[0] if dims else x.kwargs.get("dim")
        return source if dim in (1, -3) and len(shape_of(x)) == 4 else x
    if x.target not in _RESHAPES or len(shape_of(x)) != 4:
        return x
    expand = x.args[0]
    if not isinstance(expand, fx.Node) or expand.target is not aten.expand.default:
        return x
    unsqueeze = expand.args[0]
    if not isinstance(unsqueeze, fx.Node) or unsqueeze.target is not aten.unsqueeze.default:
        return x
    source, dim = unsqueeze.args
    assert isinstance(source, fx.Node)
    if dim not in (2, -3) or len(shape_of(source)) != 4:
        return x
    b, g, t, d = shape_of(source)
    repeats = shape_of(expand)[2]
    expected = shape_of(expand) == (b, g, repeats, t, d) and shape_of(x) == (b, g * repeats, t, d)
    return source if expected else x


def same_groups(k: fx.Node, v: fx.Node) -> bool:
    """Whether keys and values have as many heads."""
    return len(shape_of(k)) == 4 and len(shape_of(v)) == 4 and shape_of(k)[1] == shape_of(v)[1]


@dataclass(frozen=True)
class RaiseAttention(GraphPass):
    """`raise_attention` as a pass."""

    name: ClassVar[str] = "raise-attention"
    numerics: ClassVar[str] = "may change by rounding; a mask of the smallest float counts as -inf"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Raise every scaled dot-product attention."""
        return raise_attention(gm)
