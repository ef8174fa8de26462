"""Graph nodes as calls with rules: what propagation, search and partition see of a graph."""

from __future__ import annotations

import operator
from functools import lru_cache

from torch import fx

from msc.ir.placement import REPLICATED, VARYING, State
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.sharding.rule import Call, Rule
from msc.passes.sharding.rules import rule_for

Value = tuple[fx.Node, int]
"""A tensor: the node that computes it, and which of its results it is."""


def is_call(node: fx.Node) -> bool:
    """Whether a node computes something; picking one of several results does not."""
    return node.op == "call_function" and node.target is not operator.getitem


def value_of(node: fx.Node) -> Value:
    """The tensor that a node stands for, seen through `operator.getitem`."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index % len(tensors_of(source))
    return node, 0


def operands_of(node: fx.Node) -> list[Value]:
    """The tensors that a call reads, in the order of its rule's operands."""
    return [value_of(operand) for operand in operand_nodes(node)]


@lru_cache(maxsize=65536)
def rule_of(node: fx.Node) -> Rule | None:
    """The factor rule of a call node on its global shapes; None if its op has none."""
    operands = tuple(tensors_of(o)[0] for o in operand_nodes(node) if tensors_of(o))
    if len(operands) != len(operand_nodes(node)):
        return None
    return rule_for(Call(node.target, node.args, node.kwargs, operands, tensors_of(node)))


def differentiable(value: Value) -> bool:
    """Whether a gradient flows to a value (`cut.mark_differentiable` has said so)."""
    return bool(value[0].meta.get("differentiable", False))


def canonical(state: State, has_gradient: bool) -> State:
    """The state that stands for all that differ only in the gradient of a value without one."""
    return REPLICATED if state == VARYING and not has_gradient else state
