"""Fuse a collective with the GEMMs beside it, so that it runs while they do.

    %s = c10d.all_gather_into_tensor(%x, 2, 'tp')     %f = msc.all_gather_matmul(%x, 0, [%w], [%b],
    %g = c10d.wait_tensor(%s)                   ->         [False], [], [], True, 2, 'tp')
    %y = msc.linear(%g, %w, %b)                       %y = %f[0]
    return (%y, %g)                                   %g = %f[1]
                                                      return (%y, %g)

    %p = msc.linear_dgrad(%gy, %w)                    %gx = msc.matmul_reduce_scatter(%gy, %w,
    %s = c10d.reduce_scatter_tensor(%p, ..)     ->         None, True, 0, 2, 'tp')
    %gx = c10d.wait_tensor(%s)

By itself a GEMM can only follow the gather that it reads, and a reduction only follow the GEMM that
it sums, so that nothing hides them. On a cluster a place is fused if that shortens the block, with
all its collectives overlapped (`msc.passes.overlap`), by a part of what GEMM and collective take:
a gather that a weight gradient could run beside may stay as it is. Without a cluster nothing is
known of links and launches, so nothing is fused unless the user says so.
Numerics: products are rounded as GEMMs of other shapes are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir.communication import COLLECTIVES
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.ir.passes import UnitPass
from msc.ir.printer import format_graph
from msc.ir.rewrites import Finding
from msc.ir.values import carry
from msc.passes.block_time import block_time
from msc.passes.call_cost import call_cost
from msc.passes.collective_gemms import Gather, Place, Reduce, places
from msc.passes.compilation import Compilation, Settings, Variant
from msc.passes.differentiate import Differentiated
from msc.passes.overlap import overlapped

LEAST_GAIN = 0.03
"""Of what the GEMMs and the collective take one after the other; a model is no more exact."""
_NO_CLUSTER = (
    "without a cluster file nothing is known of what would be hidden (fuse_collectives=True fuses "
    "it anyway)"
)
_OTHERS_DIFFER = (
    "tp shards this block unequally, so that ranks have graphs of their own, which might choose "
    "otherwise"
)


@dataclass(frozen=True)
class FuseCollectives(UnitPass):
    """One op in place of each collective and its GEMMs, where that pays."""

    name: ClassVar[str] = "fuse-collectives"
    numerics: ClassVar[str] = "products are rounded as GEMMs of other shapes are"

    def run(self, unit: Compilation) -> int:
        unit.fusions = []
        if unit.settings.fuse_collectives is False:
            return 0
        done: dict[int, str] = {}
        for variant in unit.variants:
            for name, programs in _named(variant):
                for gm in _graphs(programs):
                    if id(gm) not in done:
                        done[id(gm)] = f"{name}{variant.suffix}"
                        alike = _is_alike(unit, name, programs)
                        unit.fusions += _fuse_all(gm, unit.settings, alike)
        unit.remark(*map(str, unit.fusions))
        return sum(each.changed for each in unit.fusions)


def _named(variant: Variant) -> Iterator[tuple[Any, Differentiated]]:
    yield from variant.differentiated.items()
    yield from variant.at_stage.items()


def _graphs(programs: Differentiated) -> list[fx.GraphModule]:
    halves = programs.halves
    backward = [programs.backward] if halves is None else [halves.inputs, halves.weights]
    return [gm for gm in (programs.forward, *backward) if gm is not None]


def _is_alike(unit: Compilation, name: Any, programs: Differentiated) -> bool:
    """Whether all tp ranks run this block by equal graphs, and so choose alike."""
    others = [dict(_named(variant)).get(name) for variant in unit.variants]
    if all(other is programs for other in others):
        return True
    texts = {
        tuple(map(format_graph, _graphs(other))) if other is not None else None for other in others
    }
    return len(texts) == 1


def _fuse_all(gm: fx.GraphModule, settings: Settings, alike: bool) -> list[Finding]:
    """Fuse what pays in one graph, and say what became of each place."""
    findings: list[Finding] = []
    for start in [place.start for place in places(gm)]:
        (place,) = (each for each in places(gm) if each.start is start)
        where = _where(place)
        reason, gain = place.reason or ("" if alike else _OTHERS_DIFFER), ""
        if not reason and settings.fuse_collectives == "auto":
            reason, gain = _judge(gm, place, settings)
        if reason:
            findings.append(Finding(FuseCollectives.name, where, False, reason))
            continue
        fused = fuse(place)
        findings.append(Finding(FuseCollectives.name, where, True, f"{_described(fused)}{gain}"))
    if any(each.changed for each in findings):
        gm.recompile()
    return findings


def _where(place: Place) -> str:
    """`layers.0.up, all_gather over 'tp' in the backward`."""
    kind = COLLECTIVES[place.start.target]
    phase = place.start.meta.get("phase") or place.gemm.meta.get("phase")
    part = f" in the {phase}" if phase else ""
    module = place.gemm.meta.get("module_path") or f"%{place.gemm.name}"
    return f"{module}, {kind} over '{place.group}'{part}"


def _described(fused: fx.Node) -> str:
    if fused.target is MATMUL_REDUCE_SCATTER:
        return "multiplied part by part, each on its way while the next is made"
    _, _, weights, _, _, others, _, keep, *_ = fused.args
    count = len(weights) + len(others)  # type: ignore[arg-type]
    gemms = "a GEMM" if count == 1 else f"{count} GEMMs"
    kept = "; the gathered value is returned too" if keep else ""
    return f"gathered part by part inside {gemms}{kept}"


# -- what it is worth


def _judge(gm: fx.GraphModule, place: Place, settings: Settings) -> tuple[str, str]:
    """Why a place is not worth it, or what it gains; one of the two is empty."""
    if settings.cost.cluster is None:
        return _NO_CLUSTER, ""
    trial = _copy(gm)
    (same,) = (each for each in places(trial) if each.start.name == place.start.name)
    pair = _pair_cost(same, settings)
    before = _time(trial, settings)
    alone = call_cost(fuse(same), settings)
    gain = before - _time(trial, settings)
    if gain >= LEAST_GAIN * pair:
        return "", f", {_us(gain)} of {_us(pair)} saved"
    if alone > (1 - LEAST_GAIN) * pair:
        return (
            f"in parts it would take {_us(alone)}, one after the other it takes {_us(pair)}: too "
            "little to multiply for what there is to hide",
            "",
        )
    return (
        f"fused it would take {_us(alone)} instead of {_us(pair)}, but other work of the block "
        f"hides the transfer as well: the block would take {_us(abs(gain))} "
        f"{'less' if gain > 0 else 'more'}",
        "",
    )


def _pair_cost(place: Place, settings: Settings) -> float:
    """The cost of a collective, its layout and its GEMMs, one after the other."""
    nodes = {place.start, place.gemm, *place.chain}
    if isinstance(place, Gather):
        nodes |= set(_readers(place))
    elif isinstance(place, Reduce):
        nodes |= set(place.before)
    return sum(call_cost(node, settings) for node in nodes)


def _readers(place: Gather) -> list[fx.Node]:
    """The GEMMs that become part of the op, in the order of its results."""
    return [each.node for each in place.products] + [each.node for each in place.over_rows]


def _time(gm: fx.GraphModule, settings: Settings) -> float:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return block_time(overlapped(calls, settings), settings)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    new = fx.GraphModule({}, fx.Graph())
    new.graph.output(new.graph.graph_copy(gm.graph, {}))
    for old, fresh in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        fresh.meta, fresh.name = dict(old.meta), old.name
    return new


# -- the rewrite


def fuse(place: Place) -> fx.Node:
    """Put one op in a place that has no reason against it; the new node."""
    if isinstance(place, Gather):
        return _fuse_gather(place)
    assert isinstance(place, Reduce)
    return _fuse_reduce(place)


def _fuse_gather(place: Gather) -> fx.Node:
    readers = _readers(place)
    graph = place.start.graph
    first = next(node for node in graph.nodes if node in place.gathered.users)
    args = (
        place.start.args[0],
        place.dim,
        [each.weight for each in place.products],
        [each.bias for each in place.products],
        [each.transposed for each in place.products],
        [each.other for each in place.over_rows],
        [each.is_first for each in place.over_rows],
        place.keep,
        place.size,
        place.group,
    )
    with graph.inserting_before(first):
        fused = _call(graph, ALL_GATHER_MATMUL, args)
        carry([*readers, place.start], fused)
        items = [_item(fused, position) for position in range(len(fused.meta["val"]))]
    for old, new in zip([*readers, *[place.gathered] * place.keep], items, strict=True):
        new.meta = {**old.meta, "val": new.meta["val"]}
        old.replace_all_uses_with(new)
    _erase([*readers, *reversed(place.chain), place.start])
    return fused


def _fuse_reduce(place: Reduce) -> fx.Node:
    graph = place.start.graph
    args = (
        place.x,
        place.weight,
        place.add,
        place.transposed,
        place.dim,
        place.size,
        place.group,
    )
    with graph.inserting_before(place.start):
        fused = _call(graph, MATMUL_REDUCE_SCATTER, args)
    fused.meta = {**place.result.meta, "val": fused.meta["val"]}
    carry([place.gemm, place.start], fused)
    place.result.replace_all_uses_with(fused)
    _erase([*reversed(place.chain), place.start, *reversed(place.before)])
    return fused


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    with torch.no_grad():
        value = target(*fx.map_arg(args, lambda operand: operand.meta["val"]))
    node.meta["val"] = tuple(value) if isinstance(value, list) else value
    return node


def _item(fused: fx.Node, position: int) -> fx.Node:
    node = fused.graph.call_function(operator.getitem, (fused, position))
    node.meta["val"] = fused.meta["val"][position]
    return node


def _erase(nodes: list[fx.Node]) -> None:
    """Erase nodes that nothing reads any more, readers first."""
    for node in nodes:
        node.graph.erase_node(node)
