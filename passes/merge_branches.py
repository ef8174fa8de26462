"""Add what parallel branches give before it is added to the stream.

    %a = msc.linear(%attended, %wa)  + %ba          %p = %a + %m
    %m = msc.linear(%inner, %wm)  + %bm       ->    %b = %ba + %bm
    %y = (%x + %a) + %m                             %y = %x + (%p + %b)

On tp both products are partial sums. Added first, they share one reduce-scatter, where `%x + %a`
would need one of its own; their biases are added once, behind it. A product keeps its bias where a
dropout or a gate stands behind the two. Holds for whatever is added to one stream: the branches of
GPT-NeoX, GPT-J, PaLM, Falcon, Phi and Cohere, and those that `ParallelBlock` makes.

Numerics: the order of a sum of three and more terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.passes import GraphPass
from msc.ir.walks import num_reads
from msc.passes.normalize.dead_code import remove_dead_code
from msc.passes.normalize.rewrite import Emitter, aten, replace, shape_of

_PRODUCTS = (torch.ops.msc.linear.default, aten.matmul.default, aten.bmm.default)
_BEHIND = (torch.ops.msc.dropout.default, aten.mul.Tensor, aten.add.Tensor, aten.reshape.default)


@dataclass
class _Terms:
    """What a sum consists of, in order; inner: the calls that add it up."""

    products: list[fx.Node] = field(default_factory=list)
    vectors: list[fx.Node] = field(default_factory=list)
    others: list[fx.Node] = field(default_factory=list)
    inner: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True)
class MergeBranches(GraphPass):
    """Group the products in every sum that has several, and the vectors that are added to it."""

    name: ClassVar[str] = "merge-branches"
    numerics: ClassVar[str] = "the order of residual sums"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = 0
        done: set[fx.Node] = set()
        for node in reversed(list(gm.graph.nodes)):
            if node in done or not _is_sum(node):
                continue
            terms = _Terms()
            _collect(node, node, terms)
            done |= terms.inner
            if len(terms.products) > 1 and not _is_grouped(node, terms):
                _regroup(gm, node, terms)
                changes += 1
        if changes:
            remove_dead_code(gm)
        return changes


def _is_sum(node: fx.Node) -> bool:
    """Whether a call adds two values of its own shape, or a vector to one."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    operands = [each for each in node.args if isinstance(each, fx.Node)]
    fits = (shape_of(node), shape_of(node)[-1:])
    return (
        len(operands) == 2
        and all(shape_of(each) in fits for each in operands)
        and all(each.meta["val"].dtype == node.meta["val"].dtype for each in operands)
    )


def _collect(node: fx.Node, root: fx.Node, terms: _Terms) -> None:
    """Take a sum apart, also one that is reshaped before more is added."""
    inner = node is root or num_reads(node) == 1
    if inner and _is_sum(node):
        terms.inner.add(node)
        for operand in node.args:
            assert isinstance(operand, fx.Node)
            _collect(operand, root, terms)
    elif inner and _flattens_a_sum(node):
        terms.inner.add(node)
        _collect(node.all_input_nodes[0], root, terms)
    elif len(shape_of(node)) == 1 != len(shape_of(root)):
        terms.vectors.append(node)
    elif _is_product(node):
        terms.products.append(node)
    else:
        terms.others.append(node)


def _flattens_a_sum(node: fx.Node) -> bool:
    """Whether a reshape keeps the last dim of a sum that nothing else reads."""
    if node.target is not aten.reshape.default:
        return False
    (source,) = node.all_input_nodes
    kept = shape_of(source)[-1:] == shape_of(node)[-1:]
    return kept and num_reads(source) == 1 and _is_sum(source)


def _is_product(node: fx.Node) -> bool:
    """Whether a value is a product, or linear in one that nothing else reads."""
    while num_reads(node) == 1:
        if node.target in _PRODUCTS:
            return True
        if node.target not in _BEHIND:
            return False
        large = [each for each in node.all_input_nodes if len(shape_of(each)) > 1]
        if len(large) != 1:
            return False
        (node,) = large
    return False


def _is_grouped(root: fx.Node, terms: _Terms) -> bool:
    """Whether a sum has the form that `_regroup` gives it."""
    grouped = _grouped(terms, lambda left, right: (left, right))
    return bool(_shape(root, terms.inner) == grouped)


def _shape(node: Any, inner: set[fx.Node]) -> Any:
    """The nested operands of a sum."""
    if node not in inner:
        return node
    return tuple(_shape(operand, inner) for operand in node.args)


def _grouped(terms: _Terms, add: Callable[[Any, Any], Any]) -> Any:
    """The sum of all terms by way of `add`."""
    branches = reduce(add, terms.products)
    if terms.vectors:
        branches = add(branches, reduce(add, terms.vectors))
    return reduce(add, [*terms.others, branches])


def _regroup(gm: fx.GraphModule, root: fx.Node, terms: _Terms) -> None:
    emit = Emitter(gm, root)
    shape = shape_of(root)

    def shaped(node: fx.Node) -> fx.Node:
        if shape_of(node) == shape:
            return node
        return emit(aten.reshape.default, node, list(shape), shape=shape)

    def add(left: fx.Node, right: fx.Node) -> fx.Node:
        return emit(aten.add.Tensor, left, right, shape=shape_of(left))

    terms.products = [shaped(node) for node in terms.products]
    terms.others = [shaped(node) for node in terms.others]
    replace(root, _grouped(terms, add))
