"""The modelled cost of one call of a rank-local graph: its collective, or its FLOPs and bytes."""

from __future__ import annotations

from torch import fx

from msc.cost import call_flops, window_of
from msc.cost.flops import is_gemm, nbytes
from msc.cost.fused import fused_call
from msc.cost.node_work import node_work
from msc.ir.communication import COLLECTIVES, FUSED, WAITS, group_of
from msc.ir.torch_private import storage_key
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.compilation import Settings
from msc.passes.sharding.calls import is_call


def call_cost(node: fx.Node, settings: Settings) -> float:
    """What a node costs, in the unit of `settings.cost`; views, items and waits cost nothing."""
    if not is_call(node) or node.target in WAITS or is_view(node):
        return 0.0
    if node.target in FUSED:
        return _fused_cost(node, settings)
    operands = [tensors_of(o)[0] for o in operand_nodes(node) if tensors_of(o)]
    results = tensors_of(node)
    if node.target in COLLECTIVES:
        payload = max(nbytes(tensor) for tensor in (*operands, *results))
        size = settings.mesh.axis_size(group_of(node))
        return settings.cost.collective(COLLECTIVES[node.target], payload, size)
    cluster = settings.cost.cluster
    if cluster is not None:  # as the simulator has it, with what a launch takes
        return node_work(node).seconds(cluster)
    gemm = is_gemm(node.target)
    flops = call_flops(node.target, operands, results, window_of(node)) if gemm else 0
    return settings.cost.compute(flops, sum(map(nbytes, (*operands, *results))))


def _fused_cost(node: fx.Node, settings: Settings) -> float:
    """Of a collective and its GEMMs; without a cluster nothing hides behind anything.

    Where `msc tune` has measured it, of the two one after the other times the ratio that it found.
    """
    call, cost = fused_call(node), settings.cost
    transfer = cost.collective(call.kind, call.moved_bytes, call.parts)
    if cost.cluster is not None:
        cluster = cost.cluster
        measured = None if settings.measured is None else settings.measured.fused(node)
        if measured is not None:
            works = (*call.by_rows, *call.over_rows)
            return measured.ratio * (transfer + sum(work.seconds(cluster) for work in works))
        return call.seconds(cost.cluster, transfer)
    works = (*call.by_rows, *call.over_rows)
    gemms = sum(cost.compute(work.flops, work.memory_bytes) for work in works)
    return gemms + cost.compute(0.0, call.extra_bytes) + transfer


def is_view(node: fx.Node) -> bool:
    """Whether all that a call yields lies in memory that was there before it."""
    before = {storage_key(t) for operand in node.all_input_nodes for t in tensors_of(operand)}
    return all(storage_key(tensor) in before for tensor in tensors_of(node))
