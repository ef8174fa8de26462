"""Apply the rewrites that the user has asked for.

Each place that a rewrite looks at is a finding, printed in the dump and kept in the report.
Numerics: the model becomes another one; that one is the reference of all parallel programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.errors import UserError
from msc.ir.passes import GraphPass
from msc.ir.rewrites import Finding, Rewrite


def apply_rewrites(gm: fx.GraphModule, rewrites: Sequence[Rewrite]) -> list[Finding]:
    """Apply `rewrites` in order to a normalized forward graph.

    Raises `UserError` if one of them changes nothing, with what it found.
    """
    findings: list[Finding] = []
    for rewrite in rewrites:
        found = rewrite.apply(gm)
        if not any(each.changed for each in found):
            reasons = "\n".join(f"  {each}" for each in found) or "  it found no place to look at"
            raise UserError(
                f"rewrites: {rewrite} changes nothing in this model:\n{reasons}\nLeave it out, or "
                "change the model."
            )
        findings += found
    if findings:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return findings


@dataclass(frozen=True)
class ApplyRewrites(GraphPass):
    """The rewrites of the compilation's settings, in order."""

    name: ClassVar[str] = "rewrite"
    numerics: ClassVar[str] = "the model becomes another one, as the user asks"
    essential: ClassVar[bool] = True

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        found = apply_rewrites(gm, unit.settings.rewrites)
        unit.findings += found
        unit.remark(*map(str, found))
        return sum(each.changed for each in found)
