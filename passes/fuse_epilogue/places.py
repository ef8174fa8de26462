"""Find linears with an activation or a residual sum behind them.

    %h = msc.linear(%x, %w, %b)          an Activation: %h, which is kept, since the backward reads
    %a = aten.gelu(%h)                   it too
    %y = msc.linear(%a, %v, %c)          a Residual: %y and %s
    %s = aten.add(%r, %y)
    return (%s, %h, %a)

What only views, or a collective's own op, keep from its product is a place too, with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msc.ir.ops.activations import activation_of
from msc.ir.ops.epilogue import LINEAR_EPILOGUE
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL
from msc.ir.ops.linear import LINEAR
from msc.ir.printer import format_target
from msc.ir.values import tensor_of

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}

_IN_COLLECTIVE = (
    "its GEMM is one op with a collective (fuse-collectives), whose products have no epilogue"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A product and what follows it. reason: why it must stay as it is."""

    node: fx.Node
    product: fx.Node
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Activation(Place):
    """`node` applies the activation `name` to `product`, an `msc.linear`.

    keep: something else reads the product as well.
    """

    name: str
    keep: bool


@dataclass(frozen=True, kw_only=True)
class Residual(Place):
    """`node` is the sum of `product`, an `msc.linear` or what an activation gave, and `other`."""

    other: fx.Node


def places(gm: fx.GraphModule) -> Iterator[Place]:
    """The places of a graph, in order; a graph may be rewritten at each before the next is asked.

    So the sum behind an activation is a place of what the activation has become.
    """
    for node in list(gm.graph.nodes):
        name = activation_of(node)
        if name:
            place = _activation(node, name)
        elif node.op == "call_function" and node.target is _aten.add.Tensor:
            place = _residual(node)
        else:
            continue
        if place is not None:
            yield place


def _activation(node: fx.Node, name: str) -> Place | None:
    value: Any = node.args[0]
    if not _is_linear(value):
        return _distant(node, value)
    if reason := _layout(node, value):
        return Place(node=node, product=value, reason=reason)
    return Activation(node=node, product=value, name=name, keep=len(value.users) > 1)


def _residual(node: fx.Node) -> Place | None:
    if len(node.args) != 2 or node.kwargs or not all(isinstance(o, fx.Node) for o in node.args):
        return None
    left, right = node.args
    for product, other in ((right, left), (left, right)):
        if not _is_open(product):
            continue
        if reason := _against_sum(node, product, other):
            return Place(node=node, product=product, reason=reason)
        return Residual(node=node, product=product, other=other)
    found = (_distant(node, operand) for operand in (right, left))
    return next((place for place in found if place is not None), None)


def _against_sum(node: fx.Node, product: fx.Node, other: fx.Node) -> str:
    """Why a product cannot take a sum, or ""."""
    one, two = tensor_of(node), tensor_of(other)
    if len(product.users) > 1:
        return "something else reads the product without the sum, which is not kept"
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"what is added, {two.dtype} {tuple(two.shape)}, is not of the product's shape and dtype"
    call: Any = product.args[0] if product.target is operator.getitem else product
    if any(reader is not product and _is_before(reader, node) for reader in _readers(call)):
        return "what the activation reads is needed before the sum can be made"
    return _layout(node, product)


def _readers(call: fx.Node) -> list[fx.Node]:
    """The nodes that read results of a call, besides those that pick them."""
    if call.target is LINEAR:
        return []
    return [reader for item in call.users for reader in item.users if item.args[1] != 0]


def _is_before(node: fx.Node, other: fx.Node) -> bool:
    return node.op != "output" and node < other


def _layout(node: fx.Node, product: fx.Node) -> str:
    """Why a result cannot be the op's, which is contiguous and of the product's dtype, or ""."""
    one, two = tensor_of(node), tensor_of(product)
    if one.dtype != two.dtype or one.shape != two.shape:
        return f"its result is {one.dtype} {tuple(one.shape)}, not {two.dtype} {tuple(two.shape)}"
    return "" if one.is_contiguous() else "its result is not contiguous"


def _is_linear(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is LINEAR


def _is_open(node: Any) -> bool:
    """Whether a value is a product to whose op a sum can still be added."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return _is_linear(node)
    call, index = node.args
    fused = isinstance(call, fx.Node) and call.target is LINEAR_EPILOGUE and index == 0
    return fused and call.args[3] is None  # type: ignore[union-attr]


def _distant(node: fx.Node, value: Any) -> Place | None:
    """A place whose product is there, but not as a value that can be fused."""
    passed: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.target in _VIEWS:
        passed.append(value)
        value = value.args[0]
    if not isinstance(value, fx.Node):
        return None
    if value.target is operator.getitem and _gathers(value):
        return Place(node=node, product=value, reason=_IN_COLLECTIVE)
    if passed and _is_linear(value):
        reason = f"{format_target(passed[0].target)} stands between the product and it"
        return Place(node=node, product=value, reason=reason)
    return None


def _gathers(item: fx.Node) -> bool:
    """Whether an item is a product by rows of a gathered value."""
    call, index = item.args
    if not isinstance(call, fx.Node) or call.target is not ALL_GATHER_MATMUL:
        return False
    weights: Any = call.args[2]
    return int(index) < len(weights)  # type: ignore[arg-type]
