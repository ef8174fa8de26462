"""Write a call with several results in the place of single nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from msc.ir.values import carry


def call_before(
    anchor: fx.Node, target: Any, args: Sequence[Any], sources: Sequence[fx.Node]
) -> fx.Node:
    """A call of an op before `anchor`, with its fake results and the origin of `sources`."""
    with anchor.graph.inserting_before(anchor):
        node = anchor.graph.call_function(target, tuple(args))
    with torch.no_grad():
        value = target(*fx.map_arg(tuple(args), lambda operand: operand.meta["val"]))
    node.meta["val"] = tuple(value)
    return carry(sources, node)


def take_over(call: fx.Node, index: int, old: fx.Node) -> None:
    """Let result `index` of a call stand for a node, which goes; whoever read it comes later."""
    with call.graph.inserting_after(call):
        item = call.graph.call_function(operator.getitem, (call, index))
    item.meta = {**old.meta, "val": call.meta["val"][index]}
    old.replace_all_uses_with(item)
    call.graph.erase_node(old)
