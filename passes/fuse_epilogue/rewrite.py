"""Write one op in the place of a product and what follows it."""

from __future__ import annotations

from typing import Any

from torch import fx

from msc.ir.ops.epilogue import LINEAR_EPILOGUE
from msc.ir.ops.gate import LINEAR_GATED
from msc.ir.ops.library import arguments
from msc.ir.ops.linear import LINEAR
from msc.passes.fuse_epilogue.places import Activation, Gate, Place, Residual
from msc.passes.several_results import call_before, take_over


def fuse(place: Place) -> fx.Node:
    """Put one op in a place that has no reason against it; the new node."""
    if isinstance(place, Activation):
        return _fuse_activation(place)
    if isinstance(place, Gate):
        return _fuse_gate(place)
    assert isinstance(place, Residual)
    return _fuse_residual(place)


def _fuse_activation(place: Activation) -> fx.Node:
    linear, node = place.product, place.node
    found = _arguments(linear)
    # where the product was: whatever reads that comes later
    args = (found["x"], found["w"], found["b"], None, place.name, place.keep, found["transposed"])
    fused = call_before(linear, LINEAR_EPILOGUE, args, [linear, node])
    take_over(fused, 0, node)
    if place.keep:
        take_over(fused, 1, linear)
    else:
        linear.graph.erase_node(linear)
    return fused


def _fuse_gate(place: Gate) -> fx.Node:
    product, other, node = place.product, place.other, place.node
    found = _arguments(product)
    up = None if other is None else _arguments(other)["w"]
    args = (found["x"], found["w"], up, node.args[2], place.keep, found["transposed"])
    products = [product] if other is None else [product, other]
    fused = call_before(max(products), LINEAR_GATED, args, [product, node])
    halves: list[Any] = [] if other is not None else list(node.all_input_nodes)
    take_over(fused, 0, node)
    if place.keep:
        for index, each in enumerate(products, 1):
            take_over(fused, index, each)
        return fused
    for each in (*halves, *dict.fromkeys(half.args[0] for half in halves), *products):
        fused.graph.erase_node(each)
    return fused


def _fuse_residual(place: Residual) -> fx.Node:
    product, node = place.product, place.node
    call: Any = product if product.target is LINEAR else product.args[0]
    found = _arguments(call)
    args = (
        found["x"],
        found["w"],
        found["b"],
        place.other,
        found.get("activation", ""),
        found.get("keep", False),
        found["transposed"],
    )
    # where the other summand is there
    fused = call_before(node, LINEAR_EPILOGUE, args, [call, node])
    take_over(fused, 0, node)
    for item in [user for user in call.users if user is not product]:
        take_over(fused, 1, item)
    product.graph.erase_node(product)
    if call is not product:
        call.graph.erase_node(call)
    return fused


def _arguments(call: fx.Node) -> dict[str, Any]:
    return arguments(call.target, call.args, call.kwargs)  # type: ignore[arg-type]
