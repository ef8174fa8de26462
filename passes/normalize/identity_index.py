"""Turn indexing by constant grids into views.

    %b: i64[8,1,1] = ...  # arange(8)
    %j: i64[1,1,4] = ...  # arange(4)
    %m: bool[8,1,4] = aten.index.Tensor(%mask, [%b, %j])   ->   %m = aten.reshape(%mask, [8, 1, 4])

Models read padding masks so. A view can be sharded, a gather cannot.

Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from msc.ir.passes import BIT_EXACT, GraphPass
from msc.passes.normalize.input_free import InputFree, forget_batch_two
from msc.passes.normalize.rewrite import Emitter, aten, calls, replace, shape_of


def identity_index(gm: fx.GraphModule) -> int:
    """Turn every index that only spreads dims out into a view; returns their number.

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
        if any(grid is None for grid in grids):
            continue
        places = _places([grid for grid in grids if grid is not None])
        if places is not None and _is_whole(node, source, places):
            replace(node, _spread(Emitter(gm, node), node, source, places))
            changed += 1
    forget_batch_two(gm)
    return changed


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
        """Turn every index that only spreads dims out into a view."""
        return identity_index(gm)
