"""Add an input gradient to another one inside its GEMM.

    %a = msc.linear_dgrad(%gq, %wq)         %a = msc.linear_dgrad(%gq, %wq)
    %b = msc.linear_dgrad(%gk, %wk)   ->    %s = msc.linear_dgrad(%gk, %wk, False, %a)
    %s = aten.add(%a, %b)

A value that several linears read (q, k and v; gate and up) has as many gradients. Summed inside the
GEMM they cost no pass over memory, which matters most where tp leaves the sum whole on every rank.
Numerics: one rounding fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir.ops.linear import LINEAR_DGRAD
from msc.ir.passes import GraphPass
from msc.ir.values import carry, tensor_of
from msc.ir.walks import num_reads

add = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class FuseSums(GraphPass):
    """Fuse an add into the input gradient of a linear that is one of its operands."""

    name: ClassVar[str] = "fuse-sums"
    numerics: ClassVar[str] = "one rounding fewer"

    def applies_to(self, name: str) -> bool:
        """The blocks' graphs, once they are differentiated."""
        return name.startswith("block")

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = 0
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or node.target is not add or node.kwargs:
                continue
            left, right = node.args
            product, other = (right, left) if _fusible(right) else (left, right)
            if _fusible(product) and _alike(product, node) and _alike(other, node):
                self._fuse(gm, node, product, other)
                changes += 1
        return changes

    def _fuse(self, gm: fx.GraphModule, node: fx.Node, product: fx.Node, other: fx.Node) -> None:
        gradient, weight, *rest = product.args
        transposed = rest[0] if rest else product.kwargs.get("transposed", False)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(LINEAR_DGRAD, (gradient, weight, transposed, other))
        new.meta = dict(node.meta)
        carry(product, new)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        gm.graph.erase_node(product)


def _fusible(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is LINEAR_DGRAD
        and num_reads(node) == 1
        and len(node.args) < 4
        and node.kwargs.get("sum_with") is None
    )


def _alike(other: Any, node: fx.Node) -> bool:
    if not isinstance(other, fx.Node):
        return False
    one, two = tensor_of(other), tensor_of(node)
    return one.shape == two.shape and one.dtype == two.dtype
