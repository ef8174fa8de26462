"""How a model is cut: distinct blocks, their instances, and the prelude.

A forward graph becomes a *prelude* (values that depend on no parameter, duplicated into every chunk
that needs them) and a list of block *instances*, of which equal ones share one block graph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

_LAYER = re.compile(r"^(?:(.*?)\.)?(\d+)(?:\.|$)")

SourceKind = Literal["parameter", "buffer", "input", "coordinate", "rng", "prelude", "block"]


@dataclass(frozen=True)
class Source:
    """Where a placeholder of a block instance gets its value.

    name: of the parameter, buffer, input, mesh axis, or prelude value; empty for a block's output.
    instance, output: which output of which block instance.
    """

    kind: SourceKind
    name: str = ""
    instance: int = -1
    output: int = 0

    def __str__(self) -> str:
        if self.kind == "block":
            return f"instance {self.instance}[{self.output}]"
        return f'{self.kind} "{self.name}"'


@dataclass(frozen=True)
class Instance:
    """One block of the model, at one place: a distinct block's graph with its own parameters."""

    index: int
    block: str
    path: str
    sources: tuple[Source, ...]


@dataclass
class Structure:
    """The cut model. `prelude` outputs the values named in `prelude_outputs`, in order.

    buffers: the new value of each buffer that the forward writes; from_inputs: those of them whose
    value depends on the inputs of the model.
    """

    blocks: dict[str, fx.GraphModule]
    instances: list[Instance]
    prelude: fx.GraphModule
    prelude_outputs: list[str]
    loss: Source
    buffers: dict[str, Source] = field(default_factory=dict)
    from_inputs: frozenset[str] = frozenset()

    @property
    def counts(self) -> dict[str, int]:
        """The number of instances of each block."""
        return Counter(instance.block for instance in self.instances)


def output_of(structure: Structure, source: Source) -> fx.Node:
    """The node of a block or of the prelude that a source is."""
    if source.kind == "block":
        block = structure.blocks[structure.instances[source.instance].block]
        return output_nodes(block)[source.output]
    return output_nodes(structure.prelude)[structure.prelude_outputs.index(source.name)]


def layer_of(path: str) -> tuple[str, int] | None:
    """Container and index of the outermost numbered module on a path; None if there is none."""
    match = _LAYER.match(path)
    return (match.group(1) or "", int(match.group(2))) if match else None


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a graph, in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def output_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The values that a block, prelude or forward graph returns, in order."""
    values = gm.graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    return list(values)


def layer_names(paths: Sequence[str]) -> str:
    """Paths of equal blocks in short: `h.0-3, h.7`; "(model)" for the model itself."""
    runs: list[tuple[str, int, int]] = []
    for path in paths:
        head, _, last = path.rpartition(".")
        if last.isdecimal() and runs and runs[-1][0] == head and runs[-1][2] == int(last) - 1:
            runs[-1] = (head, runs[-1][1], int(last))
        elif last.isdecimal():
            runs.append((head, int(last), int(last)))
        else:
            runs.append((path, -1, -1))
    names = []
    for head, first, last_number in runs:
        numbers = str(first) if first == last_number else f"{first}-{last_number}"
        names.append((head or "(model)") if first < 0 else f"{head}.{numbers}".lstrip("."))
    return ", ".join(names)
