"""Prove from a graph that a mask hides keys, whatever the inputs are.

A mask often holds more than a pattern: padding of the batch, a slope per head. What it hides for
certain is found by following it to its constants: `and` hides what one of its parts hides.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from msc.ir.values import tensors_of
from msc.passes.normalize.input_free import InputFree
from msc.passes.normalize.rewrite import aten

LOW = -1e30
"""A score this low has the probability 0 beside any other."""

_ANDS = {aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default}
_ORS = {aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default}
_NOTS = {aten.logical_not.default, aten.bitwise_not.default}
_WHERES = {
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
}
_MAXIMA = {aten.max.other, aten.maximum.default}
_VIEWS = {
    aten.expand.default,
    aten.reshape.default,
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}


class Fact(Enum):
    """What holds for every entry of a region."""

    TRUE = "true"
    FALSE = "false"
    LOW = "so low that it hides a key"
    UNKNOWN = "unknown"


_OPPOSITE = {Fact.TRUE: Fact.FALSE, Fact.FALSE: Fact.TRUE}


class HiddenKeys:
    """What masks and masked scores `[.., s, t]` of a graph say about a region, bool `[s, t]`."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._free = InputFree(gm)

    def hides(self, mask: fx.Node, region: Tensor, low: float = LOW) -> bool:
        """Whether no key of the region is seen: False in a bool mask, up to `low` in another."""
        return _Region(self._free, region, low).fact(mask) in (Fact.FALSE, Fact.LOW)


class _Region:
    def __init__(self, free: InputFree, region: Tensor, low: float) -> None:
        self._free = free
        self._region = region
        self._low = low
        self._known: dict[fx.Node, Fact] = {}

    def fact(self, value: Any) -> Fact:
        if not isinstance(value, fx.Node):
            return self._of_number(value)
        if value not in self._known:
            found = self._by_op(value)
            if found is Fact.UNKNOWN:  # last, since numbers of a whole batch are many
                found = self._by_number(value)
            self._known[value] = found
        return self._known[value]

    def _by_op(self, node: fx.Node) -> Fact:
        target = node.target
        if node.op != "call_function":
            return Fact.UNKNOWN
        if target in _ANDS | _ORS:
            one = Fact.FALSE if target in _ANDS else Fact.TRUE
            facts = [self.fact(value) for value in node.args]
            if one in facts:
                return one
            return _OPPOSITE[one] if set(facts) == {_OPPOSITE[one]} else Fact.UNKNOWN
        if target in _NOTS:
            return _OPPOSITE.get(self.fact(node.args[0]), Fact.UNKNOWN)
        if target in _WHERES:
            condition, chosen, other = node.args
            return self._choice(condition, chosen, other)
        if target is aten.masked_fill.Scalar:
            source, condition, number = node.args
            return self._choice(condition, number, source)
        if target is aten.lt.Scalar:
            source, number = node.args
            low = self.fact(source) is Fact.LOW and self._of_number(number) is Fact.UNKNOWN
            return Fact.TRUE if low else Fact.UNKNOWN
        if target is aten.add.Tensor:
            return Fact.LOW if Fact.LOW in map(self.fact, node.args) else Fact.UNKNOWN
        if target in _MAXIMA:
            return Fact.LOW if set(map(self.fact, node.args)) == {Fact.LOW} else Fact.UNKNOWN
        if target is aten.to.dtype:
            return self._converted(node)
        if target in _VIEWS:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return self.fact(source) if _plane(source) == _plane(node) else Fact.UNKNOWN
        return Fact.UNKNOWN

    def _choice(self, condition: Any, chosen: Any, other: Any) -> Fact:
        found = self.fact(condition)
        if found in _OPPOSITE:
            return self.fact(chosen if found is Fact.TRUE else other)
        both = {self.fact(chosen), self.fact(other)}
        return both.pop() if len(both) == 1 else Fact.UNKNOWN

    def _converted(self, node: fx.Node) -> Fact:
        found = self.fact(node.args[0])
        if tensors_of(node)[0].dtype == torch.bool:
            return Fact.TRUE if found is Fact.LOW else found
        return found if found is Fact.LOW else Fact.UNKNOWN

    def _by_number(self, node: fx.Node) -> Fact:
        value = self._free.value(node)
        if value is None:
            return Fact.UNKNOWN
        if value.dim() < 2:
            return self._of_number(value.item()) if value.numel() == 1 else Fact.UNKNOWN
        outside = ~self._region
        if value.dtype == torch.bool:
            if bool((value | outside).all()):
                return Fact.TRUE
            return Fact.FALSE if bool((~value | outside).all()) else Fact.UNKNOWN
        low = value.is_floating_point() and bool(((value <= self._low) | outside).all())
        return Fact.LOW if low else Fact.UNKNOWN

    def _of_number(self, number: Any) -> Fact:
        if isinstance(number, bool):
            return Fact.TRUE if number else Fact.FALSE
        low = isinstance(number, (int, float)) and number <= self._low
        return Fact.LOW if low else Fact.UNKNOWN


def _plane(node: fx.Node) -> torch.Size | None:
    """The last two dims; None for what has fewer."""
    value = tensors_of(node)[0]
    return value.shape[-2:] if value.dim() >= 2 else None
