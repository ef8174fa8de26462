"""Why attention could not be shown to be causal, in words for its user."""

from __future__ import annotations

from torch import Tensor, fx

from msc.ir.ops.attention import ATTENTION
from msc.passes.normalize.rewrite import aten, shape_of
from msc.passes.rewrites.hidden_keys import HiddenKeys

PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default}
_MASKINGS = {
    aten.mul.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.where.ScalarOther,
}
_SOFT = -1e3
"""Scores that all later keys have at most are meant to hide them, though they are finite."""


def why_not_causal(
    node: fx.Node, mask: fx.Node | None, plane: tuple[int, int], keys: HiddenKeys, later: Tensor
) -> str:
    """The reason why `mask` does not hide the keys of `later`, bool `[s, t]`, for certain.

    node: `msc.attention`, or the softmax of one; mask: its mask, or the scores that it reads.
    """
    s, t = plane
    if s != t:
        return f"it is not causal self-attention: {s} queries see {t} keys"
    if mask is None:
        return "it is not causal: queries see keys after them"
    if keys.hides(mask, later, _SOFT):
        return "its mask adds finite numbers, which hide no key for certain: use -inf"
    names = _buffers(mask, plane)
    if names:
        return (
            f"its mask comes from the buffer {names[0]!r}, whose values may change: compute it in "
            "forward"
        )
    if node.target is not ATTENTION and _masked_behind(node):
        return "it could not be shown to be causal: its mask stands behind the softmax"
    return "it could not be shown to be causal"


def _buffers(mask: fx.Node, plane: tuple[int, int]) -> list[str]:
    """The buffers large enough to hold a mask that `mask` comes from by no product."""
    names, pending, seen = [], [mask], {mask}
    while pending:
        node = pending.pop()
        if node.meta.get("kind") == "buffer":
            shape = shape_of(node)[-2:]
            if len(shape) == 2 and all(n >= m for n, m in zip(shape, plane, strict=True)):
                names.append(str(node.meta["name"]))
        elif node.target not in PRODUCTS:
            more = [each for each in node.all_input_nodes if each not in seen]
            seen.update(more)
            pending += more
    return sorted(names)


def _masked_behind(softmax: fx.Node) -> bool:
    """Whether probabilities are combined with another value of their plane before a product."""
    plane, pending, seen = shape_of(softmax)[-2:], [softmax], {softmax}
    while pending:
        for user in pending.pop().users:
            if user in seen or user.op != "call_function" or user.target in PRODUCTS:
                continue
            others = [each for each in user.all_input_nodes if each not in seen]
            if user.target in _MASKINGS and any(shape_of(each)[-2:] == plane for each in others):
                return True
            seen.add(user)
            pending.append(user)
    return False
