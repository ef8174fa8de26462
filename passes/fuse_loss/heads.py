"""Find the linear layers whose result a cross entropy reads.

    %y = msc.linear(%x, %w)                  a Head: linear %y, terms %t, soft_cap 0.0,
    %r = aten.reshape(%y, [32, 64])                  moves [reshape(.., [32, k])]
    %t = msc.nll_terms(%r, %labels)

A cross entropy of anything else, or of logits that something else reads too, is a head with the
reason why it must stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msc.ir.ops.library import HALF_DTYPES, arguments, compute_dtype
from msc.ir.ops.linear import LINEAR
from msc.ir.ops.loss import NLL_TERMS
from msc.ir.printer import format_target
from msc.ir.values import DTYPE_NAMES, tensor_of
from msc.ir.walks import num_reads

aten = torch.ops.aten

_MOVES = (
    aten.reshape.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.permute.default,
    aten.transpose.int,
)
_COPIES = (aten.clone.default, aten.contiguous.default)


@dataclass(frozen=True)
class Move:
    """A call that moves, picks or scales rows of logits, as one that does the same to rows of x.

    node: the call; args: those of its target after x; dim: of the result, that of the features.
    """

    node: fx.Node
    args: tuple[Any, ...]
    dim: int


@dataclass(frozen=True)
class Head:
    """A cross entropy, and the way to its logits.

    linear: the layer, None if the way begins at none in this block; between: the calls on the way,
    in order; moves: what some of them do to rows; reason: why the head must stay, "" if it need
    not.
    """

    terms: fx.Node
    linear: fx.Node | None = None
    between: tuple[fx.Node, ...] = ()
    moves: tuple[Move, ...] = ()
    soft_cap: float = 0.0
    reason: str = ""


def heads(gm: fx.GraphModule) -> list[Head]:
    """The head of each cross entropy of a rank-local block, in order."""
    found = gm.graph.find_nodes(op="call_function", target=NLL_TERMS)
    return [_head(terms) for terms in found]


def _head(terms: fx.Node) -> Head:
    given = arguments(NLL_TERMS, terms.args, terms.kwargs)
    node: fx.Node = given["logits"]
    between: list[fx.Node] = []
    moving: list[fx.Node] = []
    soft_cap = 0.0
    scaled = False
    while node.target is not LINEAR or num_reads(node) > 1:
        if num_reads(node) > 1:
            reason = (
                f"logits %{node.name} have {len(node.users)} readers, so they must be in memory"
            )
            return Head(terms, _layer(node), reason=reason)
        capped = None if soft_cap else _soft_cap(node)
        if capped is not None and scaled:
            return Head(terms, _layer(node), reason="its logits are scaled behind a soft cap")
        if capped is not None:
            soft_cap, passed = capped
            between += passed
        elif node.target in _MOVES or _factor(node) is not None:
            scaled = scaled or node.target not in _MOVES
            between.append(node)
            moving.append(node)
        elif node.target in _COPIES or _is_made_wide(node):
            between.append(node)
        else:
            return Head(terms, _layer(node), reason=_in_the_way(node))
        node = between[-1].all_input_nodes[0]
    if tensor_of(given["target"]).dim() == 0:
        return Head(terms, node, reason="its logits are those of one row, with no dim of rows")
    if scaled and arguments(LINEAR, node.args, node.kwargs)["b"] is not None:
        return Head(terms, node, reason="its logits are scaled behind a bias")
    try:
        moves = _moves(node, moving[::-1])
    except _OfTheVocabularyError as error:
        return Head(terms, node, reason=str(error))
    return Head(terms, node, tuple(between[::-1]), moves, soft_cap)


def _layer(node: fx.Node) -> fx.Node | None:
    """The layer whose result, through whatever calls, is a value's first operand."""
    while node.target is not LINEAR and node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node if node.target is LINEAR else None


def _in_the_way(node: fx.Node) -> str:
    """Why the way to the logits ends at a node."""
    if node.op != "call_function":
        return f"its logits come from %{node.name}, which another block computes"
    if node.target is aten.to.dtype:
        dtypes = tensor_of(node.all_input_nodes[0]).dtype, tensor_of(node).dtype
        before, after = (DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes)
        return f"its logits are converted from {before} to {after}, in which the loss is computed"
    return f"{format_target(node.target)} makes its logits, and no linear layer does it alone"


def _is_made_wide(node: fx.Node) -> bool:
    """Whether a call converts half types to what cross entropy computes them in."""
    if node.target is not aten.to.dtype:
        return False
    before = tensor_of(node.all_input_nodes[0]).dtype
    return before in HALF_DTYPES and tensor_of(node).dtype == compute_dtype(before)


def _soft_cap(node: fx.Node) -> tuple[float, list[fx.Node]] | None:
    """c, and the calls of `c * tanh(y / c)` from the last to the first."""
    outer = _factor(node)
    if outer is None or outer[1].target is not aten.tanh.default:
        return None
    soft_cap, tanh = outer
    divided = tanh.all_input_nodes[0]
    inner = _factor(divided)
    if inner is None or num_reads(tanh) > 1 or num_reads(divided) > 1:
        return None
    is_cap = soft_cap > 0 and math.isclose(inner[0] * soft_cap, 1.0)
    return (soft_cap, [node, tanh, divided]) if is_cap else None


def _factor(node: fx.Node) -> tuple[float, fx.Node] | None:
    """The number that a call multiplies a value with, and the value."""
    divides = node.target is aten.div.Tensor
    if not divides and node.target is not aten.mul.Tensor:
        return None
    value: Any
    number: Any
    value, number = node.args
    if not isinstance(value, fx.Node) or not isinstance(number, (int, float)) or not number:
        return None
    return (1.0 / number if divides else float(number)), value


class _OfTheVocabularyError(Exception):
    """A call does something to the vocabulary and not to rows."""


def _moves(linear: fx.Node, calls: Sequence[fx.Node]) -> tuple[Move, ...]:
    features = tensor_of(linear.all_input_nodes[0]).shape[-1]
    dim = tensor_of(linear).dim() - 1
    found: list[Move] = []
    for node in calls:
        args, dim = _move(node, dim, features)
        found.append(Move(node, args, dim))
    return tuple(found)


def _move(node: fx.Node, dim: int, features: int) -> tuple[tuple[Any, ...], int]:
    """The arguments after x of a call on x, and where its features then are; dim: where they were.

    Raises `_OfTheVocabularyError`.
    """
    before, after = tensor_of(node.all_input_nodes[0]), tensor_of(node)
    args: Any = node.args[1:]
    if _factor(node) is not None:
        return args, dim
    if node.target is aten.reshape.default:
        last = before.dim() - 1
        if dim == last and after.shape[-1] == before.shape[-1]:
            return ([*after.shape[:-1], features],), after.dim() - 1
    elif node.target is aten.permute.default:
        dims = [each % before.dim() for each in args[0]]
        return args, dims.index(dim)
    elif node.target is aten.transpose.int:
        pair = [each % before.dim() for each in args]
        return args, pair[1 - pair.index(dim)] if dim in pair else dim
    else:
        along = (args[0] if args else 0) % before.dim()
        if along != dim:
            return args, dim - (node.target is aten.select.int and along < dim)
    raise _OfTheVocabularyError(f"{format_target(node.target)} cuts or regroups the vocabulary")
