"""What a pass is, and what passes work on.

A pass only rewrites: linting, recompiling, verifying, timing and dumping are the pipeline's
(`msc.ir.pipeline`, which also exports everything that stands here).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from msc.ir.printer import format_argument
from msc.ir.verifier import Check, Violation

if TYPE_CHECKING:
    from msc.ir.dump import Dump

BIT_EXACT = "kept bit for bit"
"""What a pass says under `numerics` if it changes no bit of any result."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. Nodes are counted over all graphs of the unit."""

    name: str
    changes: int
    nodes_before: int
    nodes_after: int
    cpu_seconds: float


class Unit:
    """What a pipeline works on: named graphs ("forward", "block.0", "rank.0"), and its records.

    dump: the program after each pass of the last run.
    remarks: what the running pass has to say, for the dump.

    The front end subclasses it and adds what its passes share.
    """

    graphs: dict[str, fx.GraphModule]
    log: list[PassRecord]

    def __init__(self, graphs: Mapping[str, fx.GraphModule]) -> None:
        self.graphs = dict(graphs)
        self.log = []
        self.dump: Dump | None = None
        self.remarks: list[str] = []

    def remark(self, *lines: str) -> None:
        """Add lines to what the dump says of the running pass."""
        self.remarks += lines

    @property
    def num_nodes(self) -> int:
        """The number of nodes of all graphs."""
        return sum(len(gm.graph.nodes) for gm in self.graphs.values())


UnitCheck = Callable[[Any], Violation | None]
"""A check of several graphs of a unit against each other."""


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a unit's graphs; a frozen dataclass whose fields are its options.

    name: a few words with hyphens, unique in a pipeline.
    numerics: `BIT_EXACT`, or a sentence that says what changes, why, and how much.
    essential: whether later passes need what it makes, so that it cannot be skipped.
    requires: checks that an earlier pass must ensure.
    ensures: checks of each graph in `applies_to` that hold after this pass and from then on.
    unit_ensures: the same for checks of the whole unit.
    """

    name: ClassVar[str] = ""
    numerics: ClassVar[str] = ""
    essential: ClassVar[bool] = False
    requires: ClassVar[tuple[Check | UnitCheck, ...]] = ()
    ensures: ClassVar[tuple[Check, ...]] = ()
    unit_ensures: ClassVar[tuple[UnitCheck, ...]] = ()

    @abstractmethod
    def applies_to(self, name: str) -> bool:
        """Whether the pass, and what it ensures, concerns the graph of that name."""

    def __str__(self) -> str:
        options = ",".join(
            f"{field.name}={_option(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.repr
        )
        return f"{self.name}{{{options}}}" if options else self.name


@dataclass(frozen=True)
class GraphPass(Pass):
    """A pass that rewrites one graph at a time, in place."""

    def applies_to(self, name: str) -> bool:
        """Only the forward graph, unless a subclass says otherwise."""
        return name == "forward"

    @abstractmethod
    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Rewrite `gm`, which belongs to `unit`, and return the number of changes."""


@dataclass(frozen=True)
class UnitPass(Pass):
    """A pass that rewrites a unit as a whole: it may add, replace and remove graphs."""

    def applies_to(self, name: str) -> bool:
        """Every graph, unless a subclass says otherwise."""
        return True

    @abstractmethod
    def run(self, unit: Any) -> int:
        """Rewrite `unit` and return the number of changes."""


def _option(value: Any) -> str:
    return value if isinstance(value, str) else format_argument(value)


def run_passes_on(unit: Any, passes: Iterable[Pass]) -> None:
    """Run passes on a trial of a unit: nothing is verified, counted or dumped."""
    for each in passes:
        if isinstance(each, GraphPass):
            for name, gm in list(unit.graphs.items()):
                if each.applies_to(name):
                    each.run(gm, unit)
        else:
            assert isinstance(each, UnitPass)
            each.run(unit)
