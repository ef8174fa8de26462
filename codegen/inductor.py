"""Compile graphs that only compute with torch's Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def compile_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """A compiled `module`, specialized to the shapes of its first call; it runs under `no_grad`.

    Communication is no part of it: the emitter cuts graphs there first (`msc.codegen.pieces`), so
    that generated code alone decides when a collective starts and where it is waited for.
    """
    eager = fx.GraphModule(module, module.graph)  # a lazy one would make its code in the trace
    compiled: Callable[..., Any] = torch.compile(
        eager, backend="inductor", fullgraph=True, dynamic=False
    )
    return compiled
