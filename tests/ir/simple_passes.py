"""Graphs of unary ops, and passes that rewrite them, for the tests of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir.pipeline import BIT_EXACT, GraphPass, Unit, UnitPass
from msc.ir.torch_private import FakeTensorMode
from msc.ir.verifier import Violation

aten = torch.ops.aten
MODE = FakeTensorMode()


def fake() -> torch.Tensor:
    with MODE:
        return torch.empty(2)


def chain(*targets: Any) -> fx.GraphModule:
    """A graph that applies unary ops one after the other to a vector of 2."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = fake()
    for target in targets:
        node = graph.call_function(target, (node,))
        node.meta["val"] = fake()
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def forward(*targets: Any) -> Unit:
    return Unit({"forward": chain(*targets)})


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def no_neg(gm: fx.GraphModule) -> Violation | None:
    """Nothing is negated."""
    return next((Violation(n, f"%{n.name} negates") for n in calls(gm, aten.neg.default)), None)


def one_size(unit: Unit) -> Violation | None:
    """All graphs have the same number of nodes."""
    sizes = {len(gm.graph.nodes) for gm in unit.graphs.values()}
    return Violation(None, f"graphs of {sorted(sizes)} nodes") if len(sizes) > 1 else None


@dataclass(frozen=True)
class Replace(GraphPass):
    """Replaces one op by another, in place."""

    name: ClassVar[str] = "replace"
    numerics: ClassVar[str] = "changes, on purpose: another op"
    old: Any = aten.neg.default
    new: Any = aten.abs.default

    def run(self, gm: fx.GraphModule, unit: Unit) -> int:
        found = calls(gm, self.old)
        for node in found:
            node.target = self.new
        return len(found)


@dataclass(frozen=True)
class DropNeg(Replace):
    name: ClassVar[str] = "drop-neg"
    ensures = (no_neg,)


@dataclass(frozen=True)
class NeedsNoNeg(Replace):
    name: ClassVar[str] = "needs-no-neg"
    requires = (no_neg,)
    old: Any = aten.abs.default
    new: Any = aten.exp.default


@dataclass(frozen=True)
class BringBack(Replace):
    name: ClassVar[str] = "bring-back"
    old: Any = aten.exp.default
    new: Any = aten.neg.default


@dataclass(frozen=True)
class Reports(GraphPass):
    """Renames a node or not, and reports a number of its own choice."""

    name: ClassVar[str] = "reports"
    numerics: ClassVar[str] = BIT_EXACT
    rename: bool = False
    number: Any = 0

    def run(self, gm: fx.GraphModule, unit: Unit) -> Any:
        if self.rename:
            next(iter(gm.graph.nodes)).name = "renamed"
        return self.number


@dataclass(frozen=True)
class Split(UnitPass):
    """Turns the forward graph into two equal blocks."""

    name: ClassVar[str] = "split"
    numerics: ClassVar[str] = BIT_EXACT
    unit_ensures = (one_size,)
    number: int = 1

    def run(self, unit: Unit) -> int:
        gm = unit.graphs.pop("forward")
        unit.graphs["block.0"] = gm
        unit.graphs["block.1"] = chain(*(n.target for n in gm.graph.nodes if n.op[0] == "c"))
        return self.number


@dataclass(frozen=True)
class Lengthen(GraphPass):
    """Adds an op to the last graph only."""

    name: ClassVar[str] = "lengthen"
    numerics: ClassVar[str] = "changes, on purpose"

    def applies_to(self, name: str) -> bool:
        return name == "block.1"

    def run(self, gm: fx.GraphModule, unit: Unit) -> int:
        output = gm.graph.output_node()
        results: Any = output.args[0]
        with gm.graph.inserting_before(output):
            node = gm.graph.call_function(aten.neg.default, tuple(results))
        node.meta["val"] = fake()
        output.args = ((node,),)
        return 1
