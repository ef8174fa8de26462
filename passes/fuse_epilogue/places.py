"""Find linears with an activation, a gate or a residual sum behind them.

    %h = msc.linear(%x, %w, %b)          an Activation: %h, which is kept, since the backward reads
    %a = aten.gelu(%h)                   it too
    %y = msc.linear(%a, %v, %c)          a Residual: %y and %s
    %s = aten.add(%r, %y)
    return (%s, %h, %a)

    %p = msc.linear(%x, %w)              a Gate of %p and %q, or of the halves of one product
    %q = msc.linear(%x, %u)
    %g = msc.gated(%p, %q, 'silu')

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
from msc.ir.ops.gate import GATED
from msc.ir.ops.library import arguments
from msc.ir.ops.linear import LINEAR
from msc.ir.ops.norm_sum import ADD_LAYER_NORM, ADD_RMS_NORM
from msc.ir.printer import format_target
from msc.ir.values import tensor_of
from msc.ir.walks import is_before, num_reads

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}

_GATE_WITH_BIAS = "its kernel adds no bias to the products that it multiplies"
_IN_NORM = "the norm behind it takes the sum (fuse-norm-sums)"
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
class Gate(Place):
    """`node` gates `other` with `product`, both `msc.linear` of one value; other None: its halves.

    keep: something else reads the products as well.
    """

    other: fx.Node | None
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
        elif node.op == "call_function" and node.target is GATED:
            place = _gate(node)
        elif node.op == "call_function" and node.target in (ADD_LAYER_NORM, ADD_RMS_NORM):
            place = _before_norm(node)
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
    return Activation(node=node, product=value, name=name, keep=num_reads(value) > 1)


def _gate(node: fx.Node) -> Place | None:
    gate: Any = node.args[0]
    up: Any = node.args[1]
    if not (_is_linear(gate) and _is_linear(up)):
        return _half_gate(node, gate, up)
    one, two = (arguments(LINEAR, each.args, each.kwargs) for each in (gate, up))
    if reason := _against_gate(node, gate, up, one, two):
        return Place(node=node, product=gate, reason=reason)
    keep = num_reads(gate) > 1 or num_reads(up) > 1
    return Gate(node=node, product=gate, other=up, keep=keep)


def _against_gate(
    node: fx.Node, gate: fx.Node, up: fx.Node, one: dict[str, Any], two: dict[str, Any]
) -> str:
    """Why two products and their gate cannot be one op, or ""."""
    if gate is up:
        return "gate and up are one product"
    if one["x"] is not two["x"]:
        return "gate and up are products of two values"
    if one["b"] is not None or two["b"] is not None:
        return _GATE_WITH_BIAS
    weights = (tensor_of(one["w"]), tensor_of(two["w"]))
    if one["transposed"] != two["transposed"] or weights[0].shape != weights[1].shape:
        return "the weights of gate and up are not stored alike"
    last = max(gate, up)
    readers = [reader for each in (gate, up) for reader in each.users if reader is not node]
    if any(is_before(reader, last) for reader in readers):
        return "one product is read before the other can be made"
    return _layout(node, gate)


def _half_gate(node: fx.Node, gate: Any, up: Any) -> Place | None:
    """Of the parts of one product, as a split gives them."""
    split, first = _part(gate)
    other, second = _part(up)
    product: Any = None if split is None else split.args[0]
    if split is None or split is not other or not _is_linear(product):
        found = (_distant(node, operand) for operand in (gate, up))
        return next((place for place in found if place is not None), None)
    shape, wanted = tensor_of(product).shape, tensor_of(node).shape
    halves = shape[-1] == 2 * wanted[-1] and shape[:-1] == wanted[:-1]
    if (first, second) != (0, 1) or not halves or len(split.meta["val"]) != 2:
        return Place(node=node, product=product, reason="gate and up are not its halves in order")
    if arguments(LINEAR, product.args, product.kwargs)["b"] is not None:
        return Place(node=node, product=product, reason=_GATE_WITH_BIAS)
    keep = any(set(each.users) != {node} for each in (gate, up)) or num_reads(product) > 1
    return Gate(node=node, product=product, other=None, keep=keep)


def _part(value: Any) -> tuple[fx.Node | None, Any]:
    """The call that a value is one result of, and which."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return None, None
    call: Any = value.args[0]
    split = isinstance(call, fx.Node) and call.target is _aten.split_with_sizes.default
    return (call, value.args[1]) if split else (None, None)


def _residual(node: fx.Node) -> Place | None:
    if len(node.args) != 2 or node.kwargs or not all(isinstance(o, fx.Node) for o in node.args):
        return None
    left: Any = node.args[0]
    right: Any = node.args[1]
    for product, other in ((right, left), (left, right)):
        if not _is_open(product):
            continue
        if reason := _against_sum(node, product, other):
            return Place(node=node, product=product, reason=reason)
        return Residual(node=node, product=product, other=other)
    found = (_distant(node, operand) for operand in (right, left))
    return next((place for place in found if place is not None), None)


def _before_norm(node: fx.Node) -> Place | None:
    """A sum that is made in a norm's pass, which a product could have taken."""
    operands: Any = node.args[1::-1]
    for operand in operands:
        if _is_linear(operand):
            return Place(node=node, product=operand, reason=_IN_NORM)
    return None


def _against_sum(node: fx.Node, product: fx.Node, other: fx.Node) -> str:
    """Why a product cannot take a sum, or ""."""
    one, two = tensor_of(node), tensor_of(other)
    if num_reads(product) > 1:
        return "something else reads the product without the sum, which is not kept"
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{two.dtype} {tuple(two.shape)} is not of the product's shape and dtype"
    call: Any = product.args[0] if product.target is operator.getitem else product
    if any(is_before(reader, node) for reader in _readers(call)) or call in other.all_input_nodes:
        return "what the activation reads is needed before the sum can be made"
    return _layout(node, product)


def _readers(call: fx.Node) -> list[fx.Node]:
    """The nodes that read results of a call, besides those that pick them."""
    if call.target is LINEAR:
        return []
    return [reader for item in call.users for reader in item.users if item.args[1] != 0]


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
    call: Any = node.args[0]
    if not isinstance(call, fx.Node) or call.target is not LINEAR_EPILOGUE:
        return False
    return bool(node.args[1] == 0 and call.args[3] is None)


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
    call: Any = item.args[0]
    index: Any = item.args[1]
    if not isinstance(call, fx.Node) or call.target is not ALL_GATHER_MATMUL:
        return False
    weights: Any = call.args[2]
    return bool(index < len(weights))
