"""Put one op in the place of a head.

    %y = msc.linear(%x, %w)                          %r = aten.reshape(%x, [32, 16])
    %r = aten.reshape(%y, [32, 64])            ->    %t = msc.linear_nll_terms(%r, %w, None,
    %t = msc.nll_terms(%r, %labels, start=%s)            %labels, %s, False, 0.0)

What moved rows of logits moves rows of x, whose features are where the vocabulary was.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from msc.ir.ops.library import arguments
from msc.ir.ops.linear import LINEAR
from msc.ir.ops.linear_loss import LINEAR_NLL_TERMS
from msc.ir.ops.loss import NLL_TERMS
from msc.ir.placement import Shard
from msc.ir.values import carry, placements
from msc.passes.fuse_loss.heads import Head, Move


def fuse(gm: fx.GraphModule, head: Head, fake_mode: Any) -> fx.Node:
    """Replace a head that need not stay; returns the op."""
    assert head.linear is not None
    layer = arguments(LINEAR, head.linear.args, head.linear.kwargs)
    loss = arguments(NLL_TERMS, head.terms.args, head.terms.kwargs)
    with gm.graph.inserting_before(head.terms):
        x = layer["x"]
        for move in head.moves:
            x = _moved(gm, x, move, fake_mode)
        operands = x, layer["w"], layer["b"], loss["target"], loss["start"]
        options = layer["transposed"], head.soft_cap
        new = gm.graph.call_function(LINEAR_NLL_TERMS, (*operands, *options))
    new.meta = {**head.terms.meta, "module_path": head.linear.meta.get("module_path")}
    carry(head.linear, new)
    head.terms.replace_all_uses_with(new)
    for node in (head.terms, *reversed(head.between), head.linear):
        gm.graph.erase_node(node)
    return new


def _moved(gm: fx.GraphModule, x: fx.Node, move: Move, fake_mode: Any) -> fx.Node:
    old = move.node
    new = gm.graph.call_function(old.target, (x, *move.args), dict(old.kwargs))  # type: ignore[arg-type]
    with fake_mode:
        args, kwargs = fx.map_arg((new.args, new.kwargs), lambda node: node.meta["val"])
        value = old.target(*args, **kwargs)  # type: ignore[operator]
    new.meta = {key: each for key, each in old.meta.items() if key != "grad_placement"}
    new.meta["val"] = value
    # an axis that splits the vocabulary does not split features
    new.meta["placement"] = {
        axis: placement
        for axis, placement in placements(old).items()
        if not (isinstance(placement, Shard) and placement.dim == move.dim)
    }
    return new
