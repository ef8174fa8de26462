"""Calls that an axis could split and does not: GEMMs of odd sizes, and ops without a rule."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from msc.cost.flops import call_flops, is_gemm, nbytes, window_of
from msc.ir.placement import Shard
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.compilation import Compilation
from msc.passes.sharding.calls import is_call, operands_of, rule_of
from msc.passes.sharding.rule import factors


def find_fallbacks(unit: Compilation) -> list[str]:
    """A line for each such call of a distinct block, with what it costs in a step's forward."""
    costs: dict[str, tuple[int, int]] = {}
    total = [0, 0]
    for name, gm in unit.structure.blocks.items():
        weight = unit.structure.counts.get(name, 0)
        for node in filter(is_call, gm.graph.nodes):
            own = weight * forward_flops(node), weight * _moved_bytes(node)
            total = [have + more for have, more in zip(total, own, strict=True)]
            for reason in (*_over_tp(unit, node), *_over_batch(unit, name, node)):
                where = node.meta.get("module_path") or node.name
                op = str(node.target).removesuffix(".default")
                line = f"{where}: {op} {reason}"
                flops, moved = costs.get(line, (0, 0))
                costs[line] = flops + own[0], moved + own[1]
    return [f"{line} ({_cost(found, total)})" for line, found in costs.items()]


def forward_flops(node: fx.Node) -> int:
    """FLOPs of a call on its global shapes."""
    operands = [tensors_of(o)[0] for o in operand_nodes(node) if tensors_of(o)]
    return call_flops(node.target, operands, tensors_of(node), window_of(node))


def _moved_bytes(node: fx.Node) -> int:
    """Bytes that a call reads and writes."""
    read = [tensors_of(o)[0] for o in operand_nodes(node) if tensors_of(o)]
    return sum(map(nbytes, (*read, *tensors_of(node))))


def fallback(unit: Compilation, node: fx.Node) -> str:
    """Why tp does not split a call that it could; "" for every other call."""
    reason = next(_over_tp(unit, node), "")
    op = str(node.target).removesuffix(".default")
    return f"{node.meta.get('module_path') or node.name}: {op} {reason}" if reason else ""


def _over_tp(unit: Compilation, node: fx.Node) -> Iterator[str]:
    if unit.placed is None or unit.placed.strategies[node].factor is not None:
        return
    if rule_of(node) is None:
        yield "has no sharding rule; it runs whole on every tp rank"
    elif is_gemm(node.target):
        yield f"runs whole on every tp rank: {_whole(unit, node)}"


def _whole(unit: Compilation, node: fx.Node) -> str:
    """Why a call runs whole."""
    rule = rule_of(node)
    assert rule is not None
    assert unit.placing is not None
    if any(s.factor is not None for s in unit.placing.candidates.strategies[node]):
        if unit.settings.plan is not None:
            return "the given plan says so"
        pins = "under the pins, " if unit.settings.pinned else ""
        return f"{pins}splitting it would cost more than it saves"
    size = unit.settings.mesh.axis_size("tp")
    lengths = ", ".join(str(n) for n in dict.fromkeys(factors(rule).values()) if n > 1)
    return f"tp={size} has more ranks than each of its dims has parts (dims {lengths})"


def _over_batch(unit: Compilation, block: str, node: fx.Node) -> Iterator[str]:
    """What has no rule is computed from all samples of the batch, gathered over dp."""
    if rule_of(node) is None:
        states = unit.batch[block].states
        if any(isinstance(states[operand].value, Shard) for operand in operands_of(node)):
            yield "has no sharding rule; it runs whole on every dp rank"


def _cost(found: tuple[int, int], total: list[int]) -> str:
    (flops, moved), (all_flops, all_moved) = found, total
    return (
        f"{flops:,} FLOPs of a step's forward, {flops / max(all_flops, 1):.1%}; "
        f"{moved:,} bytes, {moved / max(all_moved, 1):.1%}"
    )
