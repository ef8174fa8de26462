"""Measures the calls of graphs that have kernels: each in ATen, and in tiles that pass the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from msc.codegen.fast_calls import function_of
from msc.codegen.kernel_calls.call import KernelCall, Plan
from msc.codegen.kernel_calls.choice import OPS, make_plan, ways_of
from msc.codegen.kernel_calls.device import Kernels
from msc.codegen.kernels.ahead_of_time import compile_kernel
from msc.codegen.kernels.description import Target
from msc.cost.measurements import ATEN, call_text
from msc.ir import actions
from msc.ir.communication import FUSED, graphs_below
from msc.ir.errors import PlanError
from msc.tuning.operands import operands
from msc.tuning.timing import Way, seconds_of

Tell = Callable[[str], None]


def kernel_calls(graphs: Iterable[fx.GraphModule]) -> dict[str, fx.Node]:
    """The calls of ops that have kernels, by their text, each distinct one once.

    Fused collectives need other ranks, and what the optimizer does has no form in ATen that could
    be called alone.
    """
    found: dict[str, fx.Node] = {}
    for rank_graph in graphs:
        for gm in graphs_below(rank_graph):
            for node in gm.graph.nodes:
                if node.op == "call_function" and node.target in OPS:
                    if node.target not in actions.ACTIONS and node.target not in FUSED:
                        found.setdefault(call_text(node), node)
    return found


def measure_call(
    node: fx.Node, kernels: Kernels, device: torch.device, tell: Tell
) -> dict[str, float]:
    """Seconds of a call by way; empty if there are no kernels for it."""
    assert kernels.target is not None
    args, kwargs = operands((node.args, dict(node.kwargs)), device)
    function = function_of(node.target)
    ways: dict[str, Way] = {}
    for way in ways_of(kernels.target, node.target):
        try:
            plan = make_plan(kernels.target, node.target, way, args, kwargs)
        except PlanError as error:
            tell(f"{call_text(node)}: no kernels: {error}")
            return {}
        if faults := _faults(plan, kernels.target):
            tell(f"{call_text(node)}, {way}: left out: {'; '.join(faults)}")
            continue
        call = KernelCall(str(node.target), "", plan, function)
        with torch.no_grad():
            call(*args, **kwargs)  # compiles
        if call.failure:
            tell(f"{call_text(node)}, {way}: left out: {call.failure}")
            continue
        ways[way] = lambda call=call: call(*args, **kwargs)  # type: ignore[misc]
    if not ways:
        return {}
    ways[ATEN] = lambda: function(*args, **kwargs)
    with torch.no_grad():
        return seconds_of(ways, device)


def _faults(plan: Plan, target: Target) -> list[str]:
    """What the gate of `make kernels` has against the kernels; the interpreter has no gate."""
    if target.interpreted:
        return []
    return [fault for kernel in plan.kernels for fault in compile_kernel(kernel).faults()]
