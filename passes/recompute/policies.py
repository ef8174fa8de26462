"""Which calls of a block's forward each named policy lets run again in the backward.

selective: what is large and cheap. Of attention that is written out, all between the product of
queries and keys and the product with the values: scores, softmax, dropout (Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 5); queries,
keys and values stay saved. `msc.attention` saves no such value, only one number per row, so there
is nothing to recompute. And what a collective gathered from the ranks' shards: the shard stays
saved and is gathered again (section 4.2.2 there).

full: everything, so that a block keeps its inputs alone (section 5 there). The block of the loss
only does what "selective" does: its backward follows its forward, so that what it saves is there at
the peak whether it is saved or recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from msc.ir.values import tensors_of

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_SOFTMAX = {_aten._softmax.default, _aten.softmax.int}
_PRODUCTS = {
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.matmul.default,
}
"""Products of two activations; one with a weight is an `msc.linear`."""

_LAYOUT = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.clone.default,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.cat.default,
    operator.getitem,
}
"""What arranges a gathered value in memory."""


def calls_again(policy: str, forward: fx.GraphModule, with_loss: bool) -> set[fx.Node]:
    """The calls of a block that a named policy lets run again; `with_loss`: it has the loss."""
    if policy == "none":
        return set()
    return full(forward) if policy == "full" and not with_loss else selective(forward)


def selective(forward: fx.GraphModule) -> set[fx.Node]:
    """The inside of attention, and gathered values."""
    found: set[fx.Node] = set()
    for node in forward.graph.nodes:
        if node.target in _SOFTMAX:
            found |= _inside_attention(node)
    return found | gathered(forward)


def full(forward: fx.GraphModule) -> set[fx.Node]:
    """Every call."""
    return {node for node in forward.graph.nodes if node.op == "call_function"}


def gathered(forward: fx.GraphModule) -> set[fx.Node]:
    """All-gathers, and what only arranges what they gathered."""
    found: set[fx.Node] = set()
    for node in forward.graph.nodes:
        if node.target is _c10d.all_gather_into_tensor.default:
            found.add(node)
            (operand,) = node.all_input_nodes
            if operand.target is _aten.clone.default:
                found.add(operand)  # made contiguous to be sent; what was copied stays saved
        elif node.target is _c10d.wait_tensor.default or node.target in _LAYOUT:
            operands = node.all_input_nodes
            if operands and all(operand in found for operand in operands):
                found.add(node)
    return found


def _inside_attention(softmax: fx.Node) -> set[fx.Node]:
    """From the product that makes a softmax's operand to the product that reads its result.

    Empty if no product of two activations makes it: it is then no attention.
    """
    size = _numel(softmax)
    above, scores = _walk(softmax, size, lambda node: node.all_input_nodes)
    below, _ = _walk(softmax, size, lambda node: node.users)
    return above | scores | below if scores else set()


def _walk(
    start: fx.Node, size: int, neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The calls of `size` elements connected with `start`, and the products that they end at."""
    found: set[fx.Node] = set()
    products: set[fx.Node] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node.target in _PRODUCTS:
            products.add(node)
        elif node not in found and node.op == "call_function" and _numel(node) == size:
            found.add(node)
            stack += neighbours(node)
    return found, products


def _numel(node: fx.Node) -> int:
    tensors = tensors_of(node)
    return tensors[0].numel() if tensors else 0
