"""Split the backward of every block: input gradients now, weight gradients when there is time.

    %dx = msc.linear_dgrad(%dy, %w)        inputs:   %dx = msc.linear_dgrad(%dy, %w)
    %dw = msc.linear_wgrad(%dy, %x)   ->             return (%dx, %dy)         # %dy is kept
    return (%dx, %dw)                      weights:  %dw = msc.linear_wgrad(%dy, %x)
                                                     return (%dw,)

What the gradients of the block's inputs need is computed first; the rest is left for later, and the
values that it reads are kept until then (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
Numerics: kept bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.structure import output_nodes, placeholders
from msc.ir.walks import ancestors
from msc.passes.compilation import Compilation, Variant
from msc.passes.cut import copy_subgraph
from msc.passes.differentiate import Differentiated
from msc.passes.halves import Halves


@dataclass(frozen=True)
class SplitBackward(UnitPass):
    """Two graphs in place of each block's backward, where the schedule asks for it."""

    name: ClassVar[str] = "split-backward"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        if not unit.schedule.rules.split:
            return 0
        changes = 0
        for variant in unit.variants:
            for name, programs in _named(variant):
                if programs.backward is None or programs.halves is not None:
                    continue  # or alike on several variants
                programs.halves = split(programs)
                del unit.graphs[f"{name}.backward{variant.suffix}"]
                unit.graphs[f"{name}.input_backward{variant.suffix}"] = programs.halves.inputs
                unit.graphs[f"{name}.weight_backward{variant.suffix}"] = programs.halves.weights
                changes += 2
        return changes


def _named(variant: Variant) -> list[tuple[str, Differentiated]]:
    """The blocks' programs with the names of their graphs."""
    at_stage = [(f"{name}.stage{stage}", p) for (stage, name), p in variant.at_stage.items()]
    return [*variant.differentiated.items(), *at_stage]


def split(programs: Differentiated) -> Halves:
    """The two halves of a block's backward."""
    assert programs.backward is not None
    nodes = list(programs.backward.graph.nodes)
    results = output_nodes(programs.backward)
    of_parameters = are_parameters(programs)
    now = input_gradient_nodes(programs)
    given = placeholders(programs.backward)
    later = [node for node in nodes if node.op == "call_function" and node not in now]
    weights = [node for node, of in zip(results, of_parameters, strict=True) if of]
    reads = {operand for node in later for operand in node.all_input_nodes} | set(weights)
    reads -= set(later)
    kept = [node for node in nodes if node in reads and node in now]
    from_given = [node for node in given if node in reads]
    inputs = [node for node, of in zip(results, of_parameters, strict=True) if not of]
    gradients = list(zip(programs.gradients, of_parameters, strict=True))
    return Halves(
        copy_subgraph(given, [n for n in nodes if n in now], [*inputs, *kept], _meta),
        copy_subgraph([*from_given, *kept], later, weights, _meta),
        tuple(position for position, of in gradients if not of),
        tuple(position for position, of in gradients if of),
        tuple(given.index(node) for node in from_given),
    )


def are_parameters(programs: Differentiated) -> list[bool]:
    """Of each gradient of a block, whether it is that of a parameter."""
    nodes = placeholders(programs.forward)
    return [nodes[position].meta["kind"] == "parameter" for position in programs.gradients]


def input_gradient_nodes(programs: Differentiated) -> set[fx.Node]:
    """The calls of a block's backward that the gradients of its inputs need.

    A result of one of them that only a weight gradient reads is picked there and then, so that the
    others of the same call need not be kept with it.
    """
    assert programs.backward is not None
    results = output_nodes(programs.backward)
    of_inputs = [n for n, of in zip(results, are_parameters(programs), strict=True) if not of]
    found = ancestors(of_inputs, lambda node: node.op == "call_function")
    for node in programs.backward.graph.nodes:
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
    return found


def _meta(node: fx.Node) -> dict[str, object]:
    if node.op == "placeholder":
        return dict(node.meta)
    return {"val": node.meta["val"], "kind": "saved", "name": node.name}
