"""Find collectives whose value a GEMM reads or makes, as `lower_collectives` writes them.

    %start = c10d.all_gather_into_tensor(%x, 2, 'tp')      a Gather: %x, dim 1, readers %y and %gw
    %wait  = c10d.wait_tensor(%start)
    %g     = aten.view(%wait, [1, 8, 4])
    %y     = msc.linear(%g, %w)
    %gw    = msc.linear_wgrad(%gy, %g)

What a dim is moved along is read off the layout nodes around the start and the wait. A collective
near a GEMM that cannot be fused with it is a place too, with the reason.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msc.ir.communication import group_of
from msc.ir.ops.library import arguments
from msc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD
from msc.ir.ops.linear_loss import LINEAR_NLL_TERMS, LINEAR_NLL_TERMS_BACKWARD
from msc.ir.printer import format_target
from msc.ir.values import tensor_of
from msc.ir.walks import num_reads

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_GEMMS = (LINEAR, LINEAR_DGRAD, LINEAR_WGRAD)
_HEADS = (LINEAR_NLL_TERMS, LINEAR_NLL_TERMS_BACKWARD)
_REPAD = torch.ops.msc.repad.default
_LAYOUT = {
    _aten.view.default,
    _aten.permute.default,
    _aten.clone.default,
    _aten.cat.default,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    operator.getitem,
    _c10d.wait_tensor.default,
}
_UNEQUAL = (
    "ranks have parts of unequal length there, which are padded on the way (msc.repad); use a size "
    "that the axis divides"
)
_WITH_LOSS = (
    "the head is one op with its loss (fuse_loss), which goes through the vocabulary part by part, "
    "not through the rows"
)
_SEGMENTS = "the parts of a rank are not one run of one dim"
_FAR = 12
"""Nodes between a collective and a GEMM that are looked through."""


@dataclass(frozen=True)
class RowProduct:
    """`linear(G, weight, bias, transposed)` on the gathered value G."""

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


@dataclass(frozen=True)
class OverRows:
    """A weight gradient, of the gathered value G and another one; is_first: G is its gradient."""

    node: fx.Node
    other: fx.Node
    is_first: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """A collective next to a GEMM. chain: its wait and layout nodes; reason: why it must stay."""

    start: fx.Node
    gemm: fx.Node
    chain: tuple[fx.Node, ...] = ()
    reason: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        size: Any = self.start.args[-2]
        return int(size)

    @property
    def group(self) -> str:
        """The symbolic name of the group."""
        return group_of(self.start)


@dataclass(frozen=True, kw_only=True)
class Gather(Place):
    """A value that is gathered along row dim `dim` for GEMMs; keep: something else reads it too."""

    dim: int
    gathered: fx.Node
    products: tuple[RowProduct, ...]
    over_rows: tuple[OverRows, ...]
    keep: bool

    @property
    def readers(self) -> list[fx.Node]:
        """The GEMMs that can be part of the op: by rows, then over them."""
        return [each.node for each in self.products] + [each.node for each in self.over_rows]


@dataclass(frozen=True, kw_only=True)
class Reduce(Place):
    """A product that is summed over ranks, of which each gets its part of row dim `dim`.

    result: this rank's part; add: a bias, or what the product is added to; before: the nodes from
    the product to the start.
    """

    dim: int
    result: fx.Node
    x: fx.Node
    weight: fx.Node
    add: fx.Node | None
    transposed: bool
    before: tuple[fx.Node, ...]


def places(gm: fx.GraphModule) -> Iterator[Place]:
    """The places of a graph, in order."""
    for node in gm.graph.nodes:
        found: Place | None = None
        if node.target is _c10d.all_gather_into_tensor.default:
            found = _gather(node)
        elif node.target is _c10d.reduce_scatter_tensor.default:
            found = _reduce(node)
        if found is not None:
            yield found


# -- gathers


def _gather(start: fx.Node) -> Place | None:
    size: Any = start.args[1]
    (wait,) = start.users
    shard = tuple(tensor_of(start.all_input_nodes[0]).shape)
    chain, dim = _gathered(wait, shard, size)
    gathered = chain[-1]
    gemms = [user for user in gathered.users if user.target in _GEMMS]
    if not gemms:
        return _distant(start, list(gathered.users), forward=True)
    late = _descendants(gathered)
    order = {node: number for number, node in enumerate(start.graph.nodes)}
    first = min(order[user] for user in gathered.users if user.op != "output")
    products: list[RowProduct] = []
    over_rows: list[OverRows] = []
    whole = dim == len(shard) - 1  # the dim that a GEMM contracts, or a weight's own
    for user in gathered.users:
        product = None if whole else _row_product(user, gathered)
        over = None if whole else _over_rows(user, gathered)
        operands = [node for node in user.all_input_nodes if node is not gathered]
        if any(node in late or order[node] > first for node in operands):
            continue
        if product is not None:
            products.append(product)
        elif over is not None:
            over_rows.append(over)
    reason = ""
    if whole:
        reason = f"dim {dim} is gathered, which the GEMM contracts or its weight has"
    elif not products and not over_rows:
        reason = "the GEMM adds to a sum, or reads what is made after the gathered value"
    return Gather(
        start=start,
        gemm=gemms[0],
        chain=tuple(chain),
        reason=reason,
        dim=dim,
        gathered=gathered,
        products=tuple(products),
        over_rows=tuple(over_rows),
        keep=len(products) + len(over_rows) < len(gathered.users),
    )


def _gathered(wait: fx.Node, shard: Sequence[int], size: int) -> tuple[list[fx.Node], int]:
    """The nodes from a wait to the gathered value, and the dim along which it was gathered."""
    for nodes in _layouts(wait):
        shape = tuple(tensor_of(nodes[-1]).shape)
        permutes = [node for node in nodes if node.target is _aten.permute.default]
        for dim, length in enumerate(shard):
            if shape != (*shard[:dim], size * length, *shard[dim + 1 :]):
                continue
            before, behind = math.prod(shard[:dim]), math.prod(shard[dim + 1 :])
            if not permutes and before == 1:
                return nodes, dim
            for permute in permutes:
                arranged = tuple(tensor_of(permute.all_input_nodes[0]).shape)
                in_order = list(_ints(permute, 1)) == [1, 0, 2, 3]
                if in_order and arranged == (size, before, length, behind):
                    return nodes, dim
    return [wait], 0


def _layouts(wait: fx.Node) -> Iterator[list[fx.Node]]:
    """The runs of nodes after a wait that may arrange what was gathered; views that do nothing to a
    shape are not written."""
    view = _only_user(wait, _aten.view.default)
    heads = [[wait]] if view is None else [[wait, view], [wait]]
    for head in heads:
        permute = _only_user(head[-1], _aten.permute.default)
        clone = None if permute is None else _only_user(permute, _aten.clone.default)
        if permute is not None and clone is not None:
            last = _only_user(clone, _aten.view.default)
            if last is not None:
                yield [*head, permute, clone, last]
            yield [*head, permute, clone]
    yield from heads


def _row_product(node: fx.Node, gathered: fx.Node) -> RowProduct | None:
    if node.target not in (LINEAR, LINEAR_DGRAD):
        return None
    found = arguments(node.target, node.args, node.kwargs)
    if node.target is LINEAR_DGRAD:
        if found["gy"] is not gathered or found["w"] is gathered or found["sum_with"] is not None:
            return None
        return RowProduct(node, found["w"], None, not found["transposed"])
    if found["x"] is not gathered or gathered in (found["w"], found["b"]):
        return None
    return RowProduct(node, found["w"], found["b"], found["transposed"])


def _over_rows(node: fx.Node, gathered: fx.Node) -> OverRows | None:
    if node.target is not LINEAR_WGRAD:
        return None
    found = arguments(node.target, node.args, node.kwargs)
    if found["gy"] is found["x"]:
        return None
    if found["gy"] is gathered:
        return OverRows(node, found["x"], not found["transposed"])
    return OverRows(node, found["gy"], found["transposed"])


# -- reductions


def _reduce(start: fx.Node) -> Place | None:
    given, how, size, _ = start.args
    assert isinstance(given, fx.Node)
    assert isinstance(size, int)
    (wait,) = start.users
    before, whole = _made(given)
    found = _product(whole)
    if found is None:
        return _distant(start, [given], forward=False)
    gemm, x, weight, add, transposed = found
    last = _only_user(wait, _aten.view.default)
    shape = tuple(tensor_of(whole).shape)
    for chain in ([wait, last], [wait]):
        dim = None if chain[-1] is None else _scattered(shape, chain[-1], before, size)
        if dim is not None:
            break
    else:
        return Place(start=start, gemm=gemm, reason=_SEGMENTS)
    nodes = tuple(node for node in chain if node is not None)
    reason = ""
    if how != "sum":
        reason = f"the ranks' values are reduced by '{how}', not summed"
    elif dim == len(shape) - 1:
        reason = f"dim {dim} is scattered, which the GEMM's weight has"
    elif any(num_reads(node) > 1 for node in (*before, gemm, whole)):
        reason = "something else reads the product too, which is never there in one place"
    elif add is _BOTH:
        reason = "the product has a bias and is added to something else"
    return Reduce(
        start=start,
        gemm=gemm,
        chain=nodes,
        reason=reason,
        dim=dim,
        result=nodes[-1],
        x=x,
        weight=weight,
        add=add if isinstance(add, fx.Node) else None,
        transposed=transposed,
        before=tuple(dict.fromkeys((gemm, whole, *before))),
    )


_BOTH = object()


def _made(given: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The layout nodes before a reduce-scatter, in order, and the value that they arrange."""
    nodes: list[fx.Node] = []
    node = given
    for target in (_aten.clone.default, _aten.permute.default, _aten.view.default):
        if node.target is target:
            nodes.insert(0, node)
            node = node.all_input_nodes[0]
    return nodes, node


def _scattered(
    shape: Sequence[int], result: fx.Node, before: Sequence[fx.Node], size: int
) -> int | None:
    """The dim of a value that is scattered to `result`; None if it is not one run of one dim."""
    part = tuple(tensor_of(result).shape)
    if len(part) != len(shape):
        return None
    arranged = [node.target for node in before]
    for dim, length in enumerate(part):
        if (*part[:dim], size * length, *part[dim + 1 :]) != tuple(shape):
            continue
        ahead, behind = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if arranged in ([], [_aten.view.default]):
            return dim if ahead == 1 else None
        if arranged != [_aten.view.default, _aten.permute.default, _aten.clone.default]:
            return None
        view, permute, _ = before
        if list(_ints(permute, 1)) != [2, 0, 1, 3, 4]:
            return None
        if list(_ints(view, 1)) == [ahead, 1, size, length, behind]:
            return dim
    return None


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, Any, bool] | None:
    """(GEMM, x, weight, what is added, transposed) of a product, or of a sum with one."""
    if node.target in (LINEAR, LINEAR_DGRAD):
        found = arguments(node.target, node.args, node.kwargs)
        if node.target is LINEAR:
            return node, found["x"], found["w"], found["b"], found["transposed"]
        return node, found["gy"], found["w"], found["sum_with"], not found["transposed"]
    if node.target is not _aten.add.Tensor or node.kwargs:
        return None
    for own, other in (node.args, node.args[::-1]):
        if not isinstance(own, fx.Node) or own.target not in (LINEAR, LINEAR_DGRAD):
            continue
        alike = isinstance(other, fx.Node) and _alike(own, node) and _alike(other, node)
        inner = _product(own) if alike and num_reads(own) == 1 and own is not other else None
        if inner is not None:
            gemm, x, weight, add, transposed = inner
            return gemm, x, weight, other if add is None else _BOTH, transposed
    return None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    left, right = tensor_of(one), tensor_of(other)
    return left.shape == right.shape and left.dtype == right.dtype


# -- what is in between


def _distant(start: fx.Node, nodes: Sequence[fx.Node], *, forward: bool) -> Place | None:
    """The place of a collective that only changes of layout keep from a GEMM, or from a head."""
    products = (*_GEMMS, *_HEADS)
    for node in nodes:
        passed: list[fx.Node] = []
        while node.target not in products and len(passed) < _FAR:
            following = list(node.users) if forward else node.all_input_nodes
            if not following or (node.target not in _LAYOUT and node.target is not _REPAD):
                break
            passed.append(node)
            gemms = [other for other in following if other.target in products]
            node = gemms[0] if gemms else following[0]
        if node.target in _HEADS:
            return Place(start=start, gemm=node, reason=_WITH_LOSS)
        if node.target in _GEMMS:
            return Place(start=start, gemm=node, reason=_between(passed))
    return None


def _between(nodes: Sequence[fx.Node]) -> str:
    targets = {node.target for node in nodes}
    if _REPAD in targets:
        return _UNEQUAL
    if _aten.cat.default in targets:
        return _SEGMENTS
    return f"{format_target(nodes[0].target)} stands between the collective and the GEMM"


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user not in found:
            found.add(user)
            pending += user.users
    return found


def _only_user(node: fx.Node, target: Any) -> fx.Node | None:
    """The one reader of a node, if it calls `target`."""
    if num_reads(node) != 1:
        return None
    (user,) = node.users
    return user if user.target is target else None


def _ints(node: fx.Node, position: int) -> Sequence[int]:
    return node.args[position]  # type: ignore[return-value]
