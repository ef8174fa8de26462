"""Give a linear its bias back, where no collective came between the two.

    %y = msc.linear(%x, %w)          ->   %y = msc.linear(%x, %w, %b)
    %z = aten.add(%y, %b)

Normalization takes them apart, so that the bias of a row-parallel linear is added once, after the
sum over ranks. The bias of a sum of linears goes to the last one. Numerics: one rounding fewer, or
another order of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import fx

from msc.ir.ops.linear import LINEAR
from msc.ir.passes import GraphPass
from msc.ir.values import carry, tensor_of
from msc.ir.walks import num_reads

add = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class FuseBias(GraphPass):
    """Fuse an add of a vector into the linear before it."""

    name: ClassVar[str] = "fuse-bias"
    numerics: ClassVar[str] = "one rounding fewer, or another order of a sum"

    def applies_to(self, name: str) -> bool:
        """Local blocks, before they are differentiated."""
        return name.startswith("block")

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = 0
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or node.target is not add or node.kwargs:
                continue
            value, bias = node.args
            product = _last_linear(value)
            if product is None or not isinstance(bias, fx.Node):
                continue
            shape = tensor_of(product).shape
            if (
                tensor_of(bias).shape != shape[-1:]
                or tensor_of(node).dtype != tensor_of(bias).dtype
            ):
                continue
            new = self._with_bias(gm, node, product, bias)
            if value is not product:
                value.replace_input_with(product, new)
                node.prepend(value)
                new = value
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            gm.graph.erase_node(product)
            changes += 1
        return changes

    def _with_bias(
        self, gm: fx.GraphModule, node: fx.Node, product: fx.Node, bias: fx.Node
    ) -> fx.Node:
        x, w, *rest = product.args
        transposed = rest[1] if len(rest) > 1 else product.kwargs.get("transposed", False)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(LINEAR, (x, w, bias, transposed))
        new.meta = {**node.meta, "val": product.meta["val"]}
        return carry(product, new)


def _last_linear(value: Any) -> fx.Node | None:
    """The linear without a bias that a value is, or that is the last term of a sum."""
    if _plain_linear(value):
        return value
    if not isinstance(value, fx.Node) or value.target is not add or num_reads(value) != 1:
        return None
    last: Any = value.args[1]
    if value.kwargs or not _plain_linear(last):
        return None
    return last if tensor_of(last).shape == tensor_of(value).shape else None


def _plain_linear(node: Any) -> TypeGuard[fx.Node]:
    return (
        isinstance(node, fx.Node)
        and node.target is LINEAR
        and num_reads(node) == 1
        and (len(node.args) < 3 or node.args[2] is None)
        and node.kwargs.get("b") is None
    )
