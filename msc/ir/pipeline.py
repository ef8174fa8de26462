"""Passes and the pipeline that runs them.

    TRAIN = Pipeline([
        RaiseOps(),
        ShardTensors(axis="tp"),     # a comment says why a pass stands where it stands
        ClosePartials(),
    ])
    TRAIN.run(unit)

A pass only rewrites. The pipeline lints, recompiles, verifies, times and dumps, and compares the
number of changes that a pass reports with whether the text of the program changed. What a pass
`ensures` is checked after it and after every later pass; what it `requires` must be ensured by an
earlier one, which is checked when the pipeline is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msc.ir import flags
from msc.ir.errors import UserError
from msc.ir.passes import BIT_EXACT as BIT_EXACT
from msc.ir.passes import GraphPass as GraphPass
from msc.ir.passes import Pass as Pass
from msc.ir.passes import PassRecord as PassRecord
from msc.ir.passes import Unit as Unit
from msc.ir.passes import UnitCheck as UnitCheck
from msc.ir.passes import UnitPass as UnitPass
from msc.ir.runner import run_passes

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, init=False)
class Pipeline:
    """Passes in the order in which they run.

    Raises `UserError` if a pass has no proper name, does not say what it does to numbers, stands
    there twice, or requires what no earlier pass ensures.
    """

    passes: tuple[Pass, ...]

    def __init__(self, passes: Iterable[Pass]) -> None:
        object.__setattr__(self, "passes", tuple(passes))
        _validate(self.passes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the passes, in order."""
        return tuple(each.name for each in self.passes)

    def with_user_passes(self, passes: Mapping[str, Pass | Sequence[Pass]]) -> Pipeline:
        """The pipeline with a user's passes at `"before:<name>"` and `"after:<name>"`."""
        if not isinstance(passes, Mapping):
            raise UserError(
                f"passes is a {type(passes).__name__}; it maps places to passes, for example "
                "{'before:cut': MyPass()}."
            )
        added: dict[str, tuple[Pass, ...]] = {}
        for place, given in passes.items():
            side, colon, name = place.partition(":")
            if side not in ("before", "after") or not colon:
                raise UserError(
                    f"A pass cannot be put at '{place}'; a place is 'before:<name>' or "
                    f"'after:<name>', where the names are {', '.join(self.names)}."
                )
            self._require_known([name], f"a pass is to run at '{place}'")
            if not isinstance(given, (Pass, list, tuple)):
                raise UserError(
                    f"At '{place}' stands a {type(given).__name__}; a pass is an instance of a "
                    "subclass of msc.GraphPass or msc.UnitPass."
                )
            added[place] = (given,) if isinstance(given, Pass) else tuple(given)
        result: list[Pass] = []
        for each in self.passes:
            result += [*added.get(f"before:{each.name}", ()), each]
            result += added.get(f"after:{each.name}", ())
        return Pipeline(result)

    def select(self, stop_after: str | None = None, skip: Sequence[str] = ()) -> Pipeline:
        """The pipeline up to and with `stop_after`, without the passes that `skip` names."""
        self._require_known(skip, f"{flags.SKIP.name} or skip= names it")
        for each in self.passes:
            if each.essential and each.name in skip:
                raise UserError(
                    f"Pass '{each.name}' cannot be left out ({flags.SKIP.name} or skip= names it): "
                    "later passes need what it makes."
                )
        chosen = self.passes
        if stop_after is not None:
            self._require_known([stop_after], f"{flags.STOP_AFTER.name} or stop_after= names it")
            chosen = chosen[: self.names.index(stop_after) + 1]
        return Pipeline(each for each in chosen if each.name not in skip)

    def run(
        self,
        unit: Unit,
        *,
        stop_after: str | None = None,
        skip: Sequence[str] | None = None,
        dump: str | Path | None = None,
    ) -> None:
        """Run the passes on `unit` in place and append a record of each to `unit.log`.

        An argument that is None is taken from its flag (`msc.ir.flags`). Raises `VerifyError` as
        soon as a pass breaks an invariant or reports a wrong number of changes.
        """
        stop_after = stop_after if stop_after is not None else flags.STOP_AFTER.text or None
        skip = flags.SKIP.names if skip is None else skip
        folder = dump if dump is not None else flags.DUMP.text or None
        chosen = self.select(stop_after, skip)
        run_passes(chosen.passes, unit, Path(folder) if folder is not None else None)

    def _require_known(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            if name not in self.names:
                raise UserError(
                    f"There is no pass '{name}' ({reason}). The passes are {', '.join(self.names)}."
                )


def _validate(passes: tuple[Pass, ...]) -> None:
    seen: set[str] = set()
    ensured: list[Any] = []
    for each in passes:
        if not isinstance(each, (GraphPass, UnitPass)):
            raise UserError(
                f"{each!r} is no pass; a pass is an instance of a subclass of msc.GraphPass or "
                "msc.UnitPass."
            )
        owner = type(each).__qualname__
        if not _NAME.fullmatch(each.name):
            raise UserError(
                f"{owner} has the name {each.name!r}; a pass has a class variable name with small "
                "letters, digits and single hyphens, such as 'close-partials'."
            )
        if not each.numerics:
            raise UserError(
                f"Pass '{each.name}' does not say what it does to numbers. Set the class variable "
                f"numerics of {owner} to {BIT_EXACT!r}, or to a sentence about what changes."
            )
        if each.name in seen:
            raise UserError(f"Pass '{each.name}' stands in the pipeline twice. Names are unique.")
        for check in each.requires:
            if check not in ensured:
                raise UserError(
                    f"Pass '{each.name}' requires {check.__name__}, which no pass before it "
                    f"ensures. Before it stand: {', '.join(seen) or 'none'}."
                )
        seen.add(each.name)
        ensured += [*each.ensures, *each.unit_ensures]
