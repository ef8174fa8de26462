"""Compile one model many times, capturing it once: most of a small model's compile time is capture.

Capture knows nothing of the mesh, so every compilation may start from a copy of the same capture.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from msc import compiler, verification
from msc.capture.captured import Captured
from msc.capture.entry import capture as original
from msc.testing import copy_graph


class Captures:
    """Stands in for `capture` in `msc.compile` and `msc.verify`.

    Remembers by model, its modes, what it trains, shapes and options.
    """

    def __init__(self) -> None:
        self.found: dict[Any, tuple[nn.Module, Captured]] = {}

    def __call__(self, model: nn.Module, inputs: Any, **options: Any) -> Captured:
        tensors = inputs.values() if isinstance(inputs, dict) else inputs
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        modes = tuple(module.training for module in model.modules())
        trainable = tuple(parameter.requires_grad for parameter in model.parameters())
        key = (id(model), modes, trainable, shapes, repr(sorted(options.items())))
        if key not in self.found:
            self.found[key] = (model, original(model, inputs, **options))
        captured = copy.copy(self.found[key][1])
        captured.graph = copy_graph(captured.graph)
        captured.notes = list(captured.notes)
        return captured


CAPTURES = Captures()


@pytest.fixture
def capture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MSC reuse the capture of an equal model and batch."""
    for module in (compiler, verification):
        monkeypatch.setattr(module, "capture", CAPTURES)
