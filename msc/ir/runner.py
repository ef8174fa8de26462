"""Runs passes one after the other and holds them to what they promise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msc.ir import flags
from msc.ir.dump import Dump, summary
from msc.ir.errors import UserError, VerifyError
from msc.ir.passes import GraphPass, Pass, PassRecord, Unit, UnitCheck, UnitPass
from msc.ir.printer import format_graph
from msc.ir.verifier import (
    Check,
    explain,
    functional,
    starts_are_waited,
    values_known,
    verify,
    well_formed,
)

# What `structure` consists of. A captured graph may have ops that write to operands until a pass
# has removed them; from then on no pass may bring one back.
_ALWAYS: tuple[Check, ...] = (well_formed, values_known, starts_are_waited)


def run_passes(passes: Sequence[Pass], unit: Unit, folder: Path | None) -> None:
    """Run `passes` on `unit`; note each in `unit.log` and `unit.dump`, in `folder` too if given."""
    run = _Run(passes, unit, folder)
    for number in range(1, len(passes) + 1):
        run.step(number)


class _Run:
    """The state between passes: the text of every graph, and what has been ensured so far.

    The text decides whether a graph changed. Printing takes a third of the time of recompiling, so
    there is nothing to gain from a fingerprint that would see less.
    """

    def __init__(self, passes: Sequence[Pass], unit: Unit, folder: Path | None) -> None:
        self._passes = passes
        self._unit = unit
        self._ensured: list[tuple[Check, Callable[[str], bool]]] = []
        self._unit_ensured: list[UnitCheck] = []
        self._texts = {name: format_graph(gm) for name, gm in unit.graphs.items()}
        unit.dump = Dump(passes, folder)
        unit.dump.start(self._texts)
        self._not_functional: set[str] = set()
        for name, gm in unit.graphs.items():
            verify(gm, _ALWAYS, f"capture, in graph '{name}'")
            if functional(gm) is not None:
                self._not_functional.add(name)

    def step(self, number: int) -> None:
        """Run pass `number`, counted from 1, record it, and verify what it left behind."""
        this = self._passes[number - 1]
        where = f"pass {number} of {len(self._passes)}, {this.name}"
        before, nodes_before = self._texts, self._unit.num_nodes
        self._unit.remarks.clear()
        start = time.process_time()
        with _named(where):
            reported = self._rewrite(this, where)
        seconds = time.process_time() - start
        self._texts = self._texts_after(this, before)
        changed = [name for name, text in self._texts.items() if before.get(name) != text]
        record = PassRecord(
            this.name, sum(reported.values()), nodes_before, self._unit.num_nodes, seconds
        )
        self._unit.log.append(record)
        self._report(number, record, changed=self._texts != before)
        self._verify(this, changed, self._texts != before, where)
        _require_honest(reported, before, self._texts, where)

    def _rewrite(self, this: Pass, where: str) -> dict[str, int]:
        """Run the pass; return the number of changes by graph, or under "" for the whole unit."""
        unit = self._unit
        if isinstance(this, UnitPass):
            return {"": _number(this.run(unit), where)}
        assert isinstance(this, GraphPass)
        graphs = dict(unit.graphs)
        reported = {
            name: _number(this.run(gm, unit), where)
            for name, gm in graphs.items()
            if this.applies_to(name)
        }
        if not reported:
            raise UserError(
                f"{where}: the pass applies to none of the graphs that there are at this place: "
                f"{', '.join(graphs)}. Put it elsewhere, such as 'before:cut', or say in "
                "applies_to(name) which graphs it rewrites."
            )
        if list(unit.graphs.items()) != list(graphs.items()):
            raise VerifyError(
                f"{where}, added, removed or replaced graphs of the unit. A GraphPass rewrites the "
                "graph that it is given; derive from UnitPass instead."
            )
        return reported

    def _texts_after(self, this: Pass, before: dict[str, str]) -> dict[str, str]:
        return {
            name: format_graph(gm)
            if isinstance(this, UnitPass) or this.applies_to(name)
            else before[name]
            for name, gm in self._unit.graphs.items()
        }

    def _report(self, number: int, record: PassRecord, changed: bool) -> None:
        assert self._unit.dump is not None
        self._unit.dump.after(number, record, self._texts, changed, self._unit.remarks)
        if flags.LOG.on:
            line = summary(number, self._passes, record)
            print(f"[msc] {line}   {1000 * record.cpu_seconds:.0f} ms", file=sys.stderr)

    def _verify(self, this: Pass, changed: list[str], any_change: bool, where: str) -> None:
        graphs = self._unit.graphs
        self._not_functional &= graphs.keys()
        for name in changed:
            here = f"{where}, in graph '{name}'"
            verify(graphs[name], [*_ALWAYS, *self._still_functional(name)], here)
            graphs[name].recompile()
            ensured = [check for check, applies in self._ensured if applies(name)]
            verify(graphs[name], ensured, here)
        for name in filter(this.applies_to, graphs):
            verify(graphs[name], this.ensures, f"{where}, in graph '{name}'")
        self._ensured += [(check, this.applies_to) for check in this.ensures]
        for unit_check in (*(self._unit_ensured if any_change else ()), *this.unit_ensures):
            violation = unit_check(self._unit)
            if violation is not None:
                raise VerifyError(explain(unit_check.__name__, violation, where))
        self._unit_ensured += this.unit_ensures

    def _still_functional(self, name: str) -> tuple[Check, ...]:
        if name in self._not_functional:
            if functional(self._unit.graphs[name]) is not None:
                return ()
            self._not_functional.discard(name)
        return (functional,)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Note the pass on an exception that is not about the user's model."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"This happened in {where}.")
        raise


def _number(changes: Any, where: str) -> int:
    if not isinstance(changes, int) or isinstance(changes, bool) or changes < 0:
        raise VerifyError(
            f"{where}, returned {changes!r}; a pass returns the number of changes that it made."
        )
    return changes


def _require_honest(
    reported: dict[str, int], before: dict[str, str], after: dict[str, str], where: str
) -> None:
    """Raise unless a graph's text changed exactly where a change was reported."""
    for name, changes in reported.items():
        differs = before != after if name == "" else before[name] != after[name]
        if differs != (changes > 0):
            scope = "the program" if name == "" else f"graph '{name}'"
            raise VerifyError(
                f"{where}, reports {changes} changes of {scope}, but its text "
                f"{'changed' if differs else 'did not change'}. What a pass changes is seen in the "
                "text (msc.ir.printer), and a pass that changes nothing returns 0."
            )
