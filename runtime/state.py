"""What a rank keeps from step to step, and the arguments of its program that come from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree


@dataclass
class RankState:
    """Parameters and moments of one rank (its shards), buffers, and the number of steps taken.

    moments: the optimizer's state, by names such as "first_moment.h.0.weight"; skipped: how many of
    the steps changed no parameter, 0-dim int64.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    seed: int = 0
    skipped: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def arguments(self, graph: fx.GraphModule, inputs: Mapping[str, Any]) -> list[Any]:
        """The values of a rank graph's placeholders for the next step, in order.

        Moments start at zero. `inputs` are this rank's rows of each input, or functions that give
        them, where the graph waits for inputs (`msc.ir.actions.arrived`).
        """
        values: list[Tensor] = []
        for node in graph.graph.find_nodes(op="placeholder"):
            kind, name = node.meta["kind"], node.meta["name"]
            if kind == "parameter":
                values.append(self.parameters[name])
            elif kind == "optimizer":
                values.append(self.moment(name))
            elif kind == "buffer":
                values.append(self.buffers[name])
            elif kind == "input":
                values.append(inputs[name])
            elif kind == "rng":
                values.append(torch.tensor([self.seed, self.step], dtype=torch.int64))
            elif kind == "step":
                values.append(torch.tensor(self.step + 1, dtype=torch.int64))
            elif kind == "skipped":
                values.append(self.skipped)
            else:
                raise KeyError(f"placeholder %{node.name} of kind '{kind}' has no source")
        return values

    def moment(self, name: str) -> Tensor:
        """A moment by its name; zeros if no step has changed it yet."""
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(self.parameters[name.partition(".")[2]])
        return self.moments[name]

    def advance(self, graph: fx.GraphModule, outputs: Mapping[str, Any]) -> None:
        """Take over what a step of the rank graph returned."""
        self.buffers.update(zip(graph.meta["buffers"], outputs.get("buffers", ()), strict=True))
        for kind, values in (("parameters", self.parameters), ("optimizer", self.moments)):
            if kind in outputs:  # nested; the names are flat
                found = pytree.tree_leaves(outputs[kind])
                values.update(zip(graph.meta[kind], found, strict=True))
        self.skipped = outputs.get("skipped", self.skipped)
        self.step += 1
