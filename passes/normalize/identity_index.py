"""Turn indexing by constant grids into views, and picking one element of each row into gathers.

    %b: i64[8,1,1] = ...  # arange(8)
    %j: i64[1,1,4] = ...  # arange(4)
    %m: bool[8,1,4] = aten.index.Tensor(%mask, [%b, %j])   ->   %m = aten.reshape(%mask, [8, 1, 4])

    %picked: f64[8,5] = aten.index.Tensor(%x, [%arange_8, %last])   # x f64[8,16,5], last i64[8]
 -> %picked = aten.squeeze.dim(aten.gather(%x, 1, %last spread to i64[8,1,5]), 1)

Models read padding masks so, and the hidden state of each sample's last token. A view can be
sharded along all dims, a gather along all but one; an index needs the dims that it picks from
whole.

Numerics: kept bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.normalize.input_free import InputFree, forget_batch_two
from msc.passes.normalize.rewrite import Emitter, aten, calls, replace, shape_of


def identity_index(gm: fx.GraphModule) -> int:
    """Turn indices that only spread dims out into views, picks into gathers; returns their number.

    Also removes the metadata of values at batch size 2, which no later pass needs.
    """
    found = calls(gm, aten.index.Tensor)
    free = InputFree(gm) if found else None
    changed = 0
    for node in found:
        assert free is not None
        source, indices = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(indices, (list, tuple))
        grids = [free.value(i) if isinstance(i, fx.Node) else None for i in indices]
        if _picks_of_each_row(source, indices, grids):
            picks = indices[1]
            assert isinstance(picks, fx.Node)
            replace(node, _gathered(Emitter(gm, node), source, picks))
            changed += 1
            continue
        if any(grid is None for grid in grids):
            continue
        places = _places([grid for grid in grids if grid is not None])
        if places is not None and _is_whole(node, source, places):
            replace(node, _spread(Emitter(gm, node), node, source, places))
            changed += 1
    forget_batch_two(gm)
    return changed


def _picks_of_each_row(
    source: fx.Node, indices: Sequence[Any], grids: Sequence[Tensor | None]
) -> bool:
    """Whether the indices are 0, 1, 2 .. over all of dim 0, and one index into dim 1 for each."""
    if len(indices) != 2 or grids[0] is None or not isinstance(indices[1], fx.Node):
        return False
    rows, picked = indices
    return (
        grids[1] is None
        and grids[0].dim() == 1
        and _places([grids[0]]) == [0]
        and picked.meta["val"].dtype == torch.int64
        and shape_of(rows) == shape_of(picked) == shape_of(source)[:1]
    )


def _gathered(emit: Emitter, source: fx.Node, picked: fx.Node) -> fx.Node:
    rows, length, *rest = shape_of(source)
    negative = emit(aten.lt.Scalar, picked, 0)
    from_behind = emit(aten.add.Tensor, picked, length, shape=(rows,))
    index = emit(aten.where.self, negative, from_behind, picked, shape=(rows,), like=picked)
    column = (rows, 1, *([1] * len(rest)))
    index = emit(aten.reshape.default, index, list(column), shape=column)
    if rest:
        index = emit(aten.expand.default, index, [rows, 1, *rest], shape=(rows, 1, *rest))
    gathered = emit(aten.gather.default, source, 1, index, shape=(rows, 1, *rest))
    return emit(aten.squeeze.dim, gathered, 1, shape=(rows, *rest))


def _places(grids: list[Tensor]) -> list[int] | None:
    """The result dim along which each grid counts 0, 1, 2 ..; None if one does not.

    The dims must be in increasing order, so that no transposition is needed.
    """
    shape = torch.broadcast_shapes(*(grid.shape for grid in grids))  # type: ignore[no-untyped-call]
    places = []
    for grid in grids:
        if grid.dtype != torch.int64:
            return None
        whole = grid.expand(shape)
        counting = [dim for dim in range(len(shape)) if grid.numel() > 1 and _counts(whole, dim)]
        if len(counting) != 1:
            return None
        places.append(counting[0])
    return places if places == sorted(set(places)) else None


def _counts(grid: Tensor, dim: int) -> bool:
    length = grid.shape[dim]
    line = torch.arange(length).view(-1, *(1,) * (grid.dim() - dim - 1))
    return bool((grid == line).all())


def _is_whole(node: fx.Node, source: fx.Node, places: list[int]) -> bool:
    """Whether the grids run over all of each dim, at the real batch size."""
    rest = len(shape_of(source)) - len(places)
    if len(shape_of(node)) - rest < 1:
        return False
    return all(shape_of(node)[place] == shape_of(source)[dim] for dim, place in enumerate(places))


def _spread(emit: Emitter, node: fx.Node, source: fx.Node, places: list[int]) -> fx.Node:
    target = shape_of(node)
    rest = shape_of(source)[len(places) :]
    head = [1] * (len(target) - len(rest))
    for place in places:
        head[place] = target[place]
    spread = (*head, *rest)
    view = emit(aten.reshape.default, source, list(spread), shape=spread)
    if spread == target:
        return view
    return emit(aten.expand.default, view, list(target), shape=target)


@dataclass(frozen=True)
class IdentityIndex(GraphPass):
    """`identity_index` as a pass."""

    name: ClassVar[str] = "identity-index"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Turn indices that only spread dims out into views, picks into gathers."""
        return identity_index(gm)
