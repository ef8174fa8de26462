"""Compile one model many times, capturing it once: most of a small model's compile time is capture.

Capture knows nothing of the mesh, so every compilation may start from a copy of the same capture.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import fx, nn

from msc import compiler
from msc.capture import Captured
from msc.capture import capture as original


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, with metadata of its own; values and fake mode are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
    copied = fx.GraphModule(gm, graph, "Forward")
    copied.meta = dict(gm.meta)
    return copied


class Captures:
    """Stands in for `capture` in `msc.compile`; remembers by model, dtype and shapes."""

    def __init__(self) -> None:
        self.found: dict[Any, tuple[nn.Module, Captured]] = {}

    def __call__(self, model: nn.Module, inputs: Any, **options: Any) -> Captured:
        tensors = inputs.values() if isinstance(inputs, dict) else inputs
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        key = (id(model), shapes, tuple(sorted(options.items(), key=lambda item: item[0])))
        if key not in self.found:
            self.found[key] = (model, original(model, inputs, **options))
        captured = copy.copy(self.found[key][1])
        captured.graph = copy_graph(captured.graph)
        captured.notes = list(captured.notes)
        return captured


CAPTURES = Captures()


@pytest.fixture
def capture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `msc.compile` reuse the capture of an equal model and batch."""
    monkeypatch.setattr(compiler, "capture", CAPTURES)
