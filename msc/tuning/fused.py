"""Measures fused collectives against the collective and its GEMMs, on ranks of this host."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from msc.cost.measurements import call_text
from msc.ir.communication import FUSED, fused_nodes
from msc.ir.errors import UserError
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL
from msc.ir.serialize import graphs_to_json
from msc.launch import launch
from msc.tuning import fused_rank
from msc.tuning.kernels import Tell

_GROUP = "tp"


def fused_calls(graphs: Iterable[fx.GraphModule]) -> dict[str, fx.GraphModule]:
    """Graphs of one fused collective each, by the call's text.

    A gather with weight gradients comes also without them, with the gathered value as a result: in
    both forms the pass may fuse it.
    """
    found: dict[str, fx.GraphModule] = {}
    for rank_graph in graphs:
        for node in fused_nodes(rank_graph):
            for args in _forms(node):
                gm = _alone(node, args)
                (call,) = (each for each in gm.graph.nodes if each.target in FUSED)
                found.setdefault(call_text(call), gm)
    return found


def _forms(node: fx.Node) -> list[tuple[Any, ...]]:
    forms = [node.args]
    if node.target is ALL_GATHER_MATMUL:
        x, dim, weights, biases, transposed, others, _, _, *rest = node.args
        if weights and others:
            forms.append((x, dim, weights, biases, transposed, [], [], True, *rest))
    return forms


def _alone(node: fx.Node, args: tuple[Any, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    inputs: dict[fx.Node, fx.Node] = {}

    def placed(each: fx.Node) -> fx.Node:
        if each not in inputs:
            inputs[each] = graph.placeholder(each.name)
            inputs[each].meta = {"val": each.meta["val"], "kind": "input", "name": each.name}
        return inputs[each]

    fx.map_arg(args, placed)  # placeholders first
    own = fx.map_arg((*args[:-1], _GROUP), placed)
    target: Any = node.target
    call = graph.call_function(target, own)
    call.meta = {"val": node.meta["val"]}
    graph.output(call)
    return fx.GraphModule({}, graph)


def size_of(gm: fx.GraphModule) -> int:
    """How many ranks the fused collective of such a graph is of."""
    (call,) = (each for each in gm.graph.nodes if each.target in FUSED)
    size: int = call.args[-2]
    return size


def ranks_here(device: torch.device) -> int:
    """How many ranks this host can run at once, each on a device or a core of its own."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0))


def measure_fused(
    calls: dict[str, fx.GraphModule], device: torch.device, tell: Tell
) -> dict[str, dict[str, float]]:
    """Seconds of each call by way, of the slowest rank."""
    found: dict[str, dict[str, float]] = {}
    most = ranks_here(device)
    for size in sorted({size_of(gm) for gm in calls.values()}):
        alike = {text: gm for text, gm in calls.items() if size_of(gm) == size}
        if size > most:
            kind = "devices" if device.type == "cuda" else "cores"
            tell(f"{len(alike)} fused collectives of {size} ranks are not measured: {most} {kind}")
            continue
        for text, seconds in _on_ranks(alike, size, device).items():
            if isinstance(seconds, str):
                tell(f"{text}: no kernels: {seconds}")
            else:
                found[text] = seconds
    return found


def _on_ranks(
    calls: dict[str, fx.GraphModule], size: int, device: torch.device
) -> dict[str, dict[str, float] | str]:
    with tempfile.TemporaryDirectory(prefix="msc-tune-") as folder:
        for number, gm in enumerate(calls.values()):
            text = json.dumps(graphs_to_json({"call": gm}))
            Path(folder, f"{number:05d}.json").write_text(text)
        code = launch([str(fused_rank.__file__), folder, device.type], size)
        if code:
            raise UserError(
                f"Fused collectives could not be measured: a rank ended with exit code {code}; "
                "what it printed stands above."
            )
        results = json.loads(Path(folder, fused_rank.RESULTS).read_text())
    return dict(zip(calls, results, strict=True))
