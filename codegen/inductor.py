"""Compile graphs that only compute with torch's Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from msc.ir.ops.epilogue import LINEAR_EPILOGUE
from msc.ir.ops.gate import GATED, GATED_BACKWARD, LINEAR_GATED
from msc.ir.ops.library import KERNELS
from msc.ir.ops.norm_sum import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM_BACKWARD_ADD,
    RMS_NORM_BACKWARD_ADD,
)

SEQUENCES = (
    GATED,
    GATED_BACKWARD,
    ADD_LAYER_NORM,
    LAYER_NORM_BACKWARD_ADD,
    ADD_RMS_NORM,
    RMS_NORM_BACKWARD_ADD,
    LINEAR_EPILOGUE,
    LINEAR_GATED,
)
"""Ops that are traced through, for Inductor fuses what stands in them as it sees fit."""


def compile_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """A compiled `module`, specialized to the shapes of its first call; it runs under `no_grad`.

    Communication is no part of it: the emitter cuts graphs there first (`msc.codegen.pieces`), so
    that generated code alone decides when a collective starts and where it is waited for.
    """
    # not the lazy kind, which would make its code in the trace
    eager = fx.GraphModule(module, fx.Graph())
    eager.graph.output(eager.graph.graph_copy(module.graph, {}))
    for node in eager.graph.nodes:
        if node.target in SEQUENCES:
            node.target = KERNELS[node.target]
    eager.recompile()
    compiled: Callable[..., Any] = torch.compile(
        eager, backend="inductor", fullgraph=True, dynamic=False
    )
    return compiled
