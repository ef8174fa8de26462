"""Let every query of causal attention see only the last `window` keys.

    %a = msc.attention(%q, %k, %v, None, 0.25, True)
        ->   %a = msc.attention(%q, %k, %v, None, 0.25, True, 256)

Such attention runs in blocks (`msc/ir/ops/attention_bands.py`), also with grouped heads, masks (and
so ALiBi) and soft caps. What `msc.attention` does not compute, such as dropout of probabilities or
a trained position bias, keeps its matmul and softmax, and the window hides scores there:

    %p = aten.softmax(%s, -1)   ->   %p = aten.softmax(aten.masked_fill(%s, %old, lowest), -1)

Sliding-window attention as in Longformer (Beltagy et al., 2020, section 3.1), and in MegaScale
(Jiang et al., NSDI 2024, section 3.1): stacked layers still see n * window tokens back.

Numerics: another model, on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from msc.ir.errors import UserError
from msc.ir.ops.attention import ATTENTION
from msc.ir.ops.library import arguments
from msc.ir.rewrites import Finding, Rewrite
from msc.ir.structure import layer_of
from msc.passes.normalize.rewrite import Emitter, aten, calls, named_arguments, shape_of
from msc.passes.rewrites.causality import PRODUCTS, why_not_causal
from msc.passes.rewrites.hidden_keys import HiddenKeys

_ELEMENTWISE = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.sub.Tensor,
    aten.tanh.default,
    aten.to.dtype,
    aten.masked_fill.Scalar,
    aten.where.self,
    aten.where.ScalarOther,
    aten.max.other,
    aten.maximum.default,
    aten.clamp.default,
    aten.reshape.default,  # that merges samples and heads
}


@dataclass(frozen=True)
class SlidingWindow(Rewrite):
    """Causal attention of query i to keys i - window < j <= i.

    window: the keys that a query sees, itself included; at least 1.
    layers: numbers of the layers to change, such as `range(0, 12, 2)` or `[0, 3]`; None for all. A
        layer's number is that of the outermost numbered module on its path: 3 for `h.3.attn`.

    Left alone, with the reason in `report.rewrites`: attention that is not causal, cross attention,
    a window as long as the sequence, attention with a window as short already. Raises `UserError`
    for a window or layers that are none, and for layers that have no attention.
    """

    window: int
    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            raise UserError(
                f"SlidingWindow: window={self.window!r} is the number of keys that a query sees, "
                "itself included: a whole number of at least 1."
            )
        if self.layers is not None and (
            not isinstance(self.layers, (list, tuple, range))
            or not all(type(number) is int and number >= 0 for number in self.layers)
        ):
            raise UserError(
                f"SlidingWindow: layers={self.layers!r} is None for all layers, or a list, tuple "
                "or range of layer numbers, such as range(0, 12, 2)."
            )
        if self.layers is not None and not self.layers:
            raise UserError(
                f"SlidingWindow: layers={self.layers!r} names no layer; None means all of them."
            )

    def apply(self, gm: fx.GraphModule) -> list[Finding]:
        """Change `msc.attention` and attention in matmul and softmax; a finding for each."""
        found = [node for node in calls(gm, ATTENTION, aten.softmax.int) if _is_attention(node)]
        self._check_layers(found)
        keys = HiddenKeys(gm)
        findings = []
        for node in found:
            where = str(node.meta.get("module_path") or "")
            reason = self._outside(where) or self._obstacle(node, keys)
            what = reason or self._change(gm, node)
            findings.append(Finding("SlidingWindow", where, not reason, what))
        return findings

    def _check_layers(self, found: list[fx.Node]) -> None:
        paths = [layer_of(str(node.meta.get("module_path") or "")) for node in found]
        known = sorted({path[1] for path in paths if path is not None})
        missing = sorted(set(self.layers or ()) - set(known))
        if missing:
            raise UserError(
                f"SlidingWindow: layers={self.layers!r} names {missing}, which have no attention. "
                f"Layers with attention are {known}: leave the others out."
            )

    def _outside(self, where: str) -> str:
        """Why `layers` does not name this place; empty if it does."""
        layer = layer_of(where)
        if self.layers is None:
            return ""
        if layer is None:
            return "it is in no numbered layer"
        return "" if layer[1] in self.layers else f"layer {layer[1]} is not among those asked for"

    def _obstacle(self, node: fx.Node, keys: HiddenKeys) -> str:
        """Why this attention cannot have the window; empty if it can."""
        s, t = _plane(node)
        later, old = _beyond(s, t, self.window)
        if node.target is ATTENTION:
            named = arguments(node.target, node.args, node.kwargs)
            mask, causal, own = named["mask"], named["causal"], named["window"]
        else:
            mask, causal, own = named_arguments(node, {})["self"], False, 0
        if not causal and (mask is None or s != t or not keys.hides(mask, later)):
            return why_not_causal(node, mask, (s, t), keys, later)
        if self.window >= s:
            return f"a window of {self.window} hides none of {s} positions"
        if 0 < own <= self.window:
            return f"it has a window of {own} already"
        if mask is not None and keys.hides(mask, old):
            return "its mask has a window as short already"
        return ""

    def _change(self, gm: fx.GraphModule, node: fx.Node) -> str:
        s, t = _plane(node)
        seen = f"each query sees {self.window} of {t} keys"
        if node.target is ATTENTION:
            *first, _, window, soft_cap = arguments(node.target, node.args, node.kwargs).values()
            node.args = (*first, True, self.window, *([soft_cap] if soft_cap else []))
            return f"{seen}, instead of {window}" if window else seen
        emit = Emitter(gm, node)
        ones = emit(aten.ones.default, [s, t], dtype=torch.bool)
        old = emit(aten.tril.default, ones, -self.window)
        scores = named_arguments(node, {})["self"]
        lowest = torch.finfo(scores.meta["val"].dtype).min
        node.args = (emit(aten.masked_fill.Scalar, scores, old, lowest), *node.args[1:])
        # A row without a visible key weighs all alike: those outside the window get nothing.
        with gm.graph.inserting_after(node):
            cleared = gm.graph.call_function(aten.masked_fill.Scalar, (node, old, 0.0))
        cleared.meta = dict(node.meta)
        node.replace_all_uses_with(cleared, delete_user_cb=lambda user: user is not cleared)
        return f"{seen}, and the scores of all are still computed"


def _plane(node: fx.Node) -> tuple[int, int]:
    """Queries and keys."""
    if node.target is ATTENTION:
        named = arguments(node.target, node.args, node.kwargs)
        return shape_of(named["q"])[2], shape_of(named["k"])[2]
    s, t = shape_of(node)[-2:]
    return s, t


def _beyond(s: int, t: int, window: int) -> tuple[Tensor, Tensor]:
    """Bool `[s, t]`: keys after their query, and keys before the window."""
    ones = torch.ones(s, t, dtype=torch.bool)
    return ones.triu(1), ones.tril(-window)


def _is_attention(node: fx.Node) -> bool:
    """Whether a call is `msc.attention`, or a softmax of the scores of one."""
    if node.target is ATTENTION:
        return True
    named = named_arguments(node, {"dtype": None})
    dims = len(shape_of(node))
    return dims >= 3 and named["dim"] in (-1, dims - 1) and _from_product(named["self"])


def _from_product(scores: fx.Node) -> bool:
    """Whether scores come from a product, by ops on each of them alone, each in its plane."""
    if scores.target in PRODUCTS:
        return True
    sources = scores.all_input_nodes if scores.target in _ELEMENTWISE else []
    size, plane = math.prod(shape_of(scores)), shape_of(scores)[-2:]
    whole = [
        source
        for source in sources
        if shape_of(source)[-2:] == plane and math.prod(shape_of(source)) == size
    ]
    return any(_from_product(source) for source in whole)
