"""Remove collectives that undo or repeat each other.

    %g: all_gather(%x, 0, ..., 'tp')   %s: shard(%g, 0, ..., 'tp')       ->   %x
    %r: all_reduce(%x, 'sum', 'tp')    %s: shard(%r, 0, ..., 'tp')       ->   reduce_scatter(%x, 0)
    %g: all_gather(%x, 0, ..., 'tp')   %h: all_gather(%x, 0, ..., 'tp')  ->   %g, %g

Equal collectives, local conversions and arithmetic on coordinates become one; a conversion of a
conversion becomes the one that leads there directly, forward and backward. An inner conversion that
others read as well stays, so that nothing is sent twice: then only what costs nothing replaces it.
Each rewrite keeps the state of the gradient, so it holds for both directions.

`shard` converts each value from the state in which it is computed, once for all readers, so it
leaves no such pairs in GPT-2, Llama (also with fewer key heads than ranks), NeoX, Falcon, Phi-3,
BART, Swin and nn.Transformer at tp=2 and at dp=2,tp=4 with two micro-batches. In practice only the
coordinates that dropouts read repeat (GPT-2 with dropout: 1 and 3 times). The rest is for what the
passes of users and later ones of ours bring together.

Numerics: kept, but for the order of sums where two gradients are added before they are reduced.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir.ops import arguments
from msc.ir.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    GRAD_REDUCE,
    REDUCE_SCATTER,
    SHARD,
    SHARD_PAD,
)
from msc.ir.passes import GraphPass
from msc.ir.torch_private import OpOverload
from msc.ir.values import tensors_of
from msc.ir.walks import num_reads

_CONVERSIONS = (ALL_GATHER, ALL_REDUCE, GRAD_REDUCE, REDUCE_SCATTER, SHARD, SHARD_PAD)
_COORDINATES = torch.ops.msc.global_coordinates.default
_ARITHMETIC = (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor)
_HOW = ("x", "index", "grad", "op")

Kind = tuple[Any, str]
"""An op, and the gradient that its `grad` states (of an all-reduce, of sums)."""

_BOTH_ALONG_ONE_DIM: dict[tuple[Kind, Kind], Kind | None] = {
    ((ALL_GATHER, "reduce_scatter"), (SHARD, "pad")): None,
    ((ALL_GATHER, "shard"), (SHARD, "all_gather")): None,
    ((SHARD, "pad"), (ALL_GATHER, "reduce_scatter")): None,
    ((SHARD, "all_gather"), (ALL_GATHER, "shard")): None,
    ((SHARD, "all_gather"), (ALL_GATHER, "reduce_scatter")): (GRAD_REDUCE, ""),
    ((REDUCE_SCATTER, ""), (ALL_GATHER, "shard")): (ALL_REDUCE, "identity"),
    ((REDUCE_SCATTER, ""), (ALL_GATHER, "reduce_scatter")): (ALL_REDUCE, "all_reduce"),
}
"""Inner and outer conversion of the same runs of one dim -> the one of both; None: the operand."""

_BOTH_OVER_ONE_AXIS: dict[tuple[Kind, Kind], Kind] = {
    ((ALL_REDUCE, "identity"), (SHARD, "all_gather")): (REDUCE_SCATTER, ""),
    ((ALL_REDUCE, "all_reduce"), (SHARD, "pad")): (REDUCE_SCATTER, ""),
    ((ALL_REDUCE, "identity"), (GRAD_REDUCE, "")): (ALL_REDUCE, "all_reduce"),
    ((ALL_GATHER, "shard"), (GRAD_REDUCE, "")): (ALL_GATHER, "reduce_scatter"),
    ((GRAD_REDUCE, ""), (SHARD, "pad")): (SHARD, "all_gather"),
}


@dataclass(frozen=True)
class CleanCollectives(GraphPass):
    """Join equal conversions, and shorten chains of them."""

    name: ClassVar[str] = "clean-collectives"
    numerics: ClassVar[str] = "gradients of values gathered twice are added before they are reduced"

    def applies_to(self, name: str) -> bool:
        """Local graphs, before they are differentiated."""
        return name.startswith("block") or name in ("prelude", "prologue")

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = 0
        while found := _join_equal(gm) + _shorten(gm):
            changes += found
        return changes


def _join_equal(gm: fx.GraphModule) -> int:
    """Replace each conversion by an equal one before it."""
    first: dict[Hashable, fx.Node] = {}
    changes = 0
    for node in list(gm.graph.nodes):
        if not _is_pure(node):
            continue
        values = node.args if node.target in _ARITHMETIC else tuple(_named(node).values())
        same = first.setdefault((node.target, _hashable(values)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
            changes += 1
    return changes


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in _CONVERSIONS or node.target is _COORDINATES:
        return True
    scalars = all(t.dim() == 0 and not t.is_floating_point() for t in tensors_of(node))
    return node.target in _ARITHMETIC and scalars and not node.kwargs


def _hashable(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    # 1 and 1.0 and True are equal keys, but not equal arguments
    return value if isinstance(value, fx.Node) else (type(value), value)


def _shorten(gm: fx.GraphModule) -> int:
    """Replace each conversion of a conversion by what leads there directly."""
    changes = 0
    for outer in list(gm.graph.nodes):
        kind = _kind(outer)
        inner = outer.args[0] if kind is not None and outer.args else None
        if kind is None or not isinstance(inner, fx.Node) or (before := _kind(inner)) is None:
            continue
        how, what = _named(outer), _named(inner)
        pair = (before, kind)
        if pair in _BOTH_ALONG_ONE_DIM and _place(how) == _place(what):
            direct = _BOTH_ALONG_ONE_DIM[pair]
        elif pair in _BOTH_OVER_ONE_AXIS and how["axis"] == what["axis"]:
            direct = _BOTH_OVER_ONE_AXIS[pair]
        else:
            continue
        if direct is None:
            if _returned(outer) and what["x"].op == "placeholder":
                continue  # a block returns what it computes
            outer.replace_all_uses_with(what["x"])
        elif num_reads(inner) > 1:
            continue  # it is sent anyway
        else:
            outer.replace_all_uses_with(_insert(gm, outer, direct, {**what, **how, "x": what["x"]}))
        gm.graph.erase_node(outer)
        if not inner.users:
            gm.graph.erase_node(inner)
        changes += 1
    return changes


def _kind(node: fx.Node) -> Kind | None:
    """The node's conversion; None for what is none, and for maxima and the like."""
    if node.op != "call_function" or node.target not in _CONVERSIONS or node.target is SHARD_PAD:
        return None
    named = _named(node)
    return None if named.get("op", "sum") != "sum" else (node.target, named.get("grad", ""))


def _named(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, OpOverload)
    return arguments(node.target, node.args, node.kwargs)


def _place(named: dict[str, Any]) -> Hashable:
    return tuple((k, _hashable(v)) for k, v in sorted(named.items()) if k not in _HOW)


def _returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _insert(gm: fx.GraphModule, outer: fx.Node, kind: Kind, named: dict[str, Any]) -> fx.Node:
    """A conversion of that kind, whose other arguments are those of the two that it replaces."""
    target, grad = kind
    values = {**named, "grad": grad, "op": "sum"}
    if grad == "reduce_scatter":
        values["index"] = None
    names = [argument.name for argument in target._schema.arguments]
    with gm.graph.inserting_before(outer):
        new = gm.graph.call_function(
            target, tuple(values[name] for name in names if name in values)
        )
    new.meta = dict(outer.meta)
    return new
