"""Recompute in the backward what the user's policy does not save; see `rewrite` for the picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.recompute import MemoryBudget
from msc.passes.compilation import Compilation
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.kept_bytes import kept_bytes
from msc.passes.recompute.policies import calls_again
from msc.passes.recompute.rewrite import recompute, saved_nodes


@dataclass(frozen=True)
class Recompute(UnitPass):
    """Rewrite the forward and backward of distinct blocks by a named policy.

    All instances of a block do the same. A budget is another pass's work (`KeepBudget`).
    """

    name: ClassVar[str] = "recompute"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        policy = unit.settings.recompute
        if policy == "none" or isinstance(policy, MemoryBudget):
            return 0
        loss = unit.structure.instances[unit.structure.loss.instance].block
        done: dict[int, Differentiated] = {}  # blocks that are alike on several variants
        changes = 0
        for variant in unit.variants:
            for name, programs in variant.differentiated.items():
                if id(programs) not in done:
                    again = calls_again(policy, programs.forward, name == loss)
                    new = done[id(programs)] = recompute(programs, again)
                    if new is not programs:
                        changes += 1
                        record(unit, name, variant.suffix, new)
                        remark(unit, name + variant.suffix, programs, new)
                variant.differentiated[name] = done[id(programs)]
        return changes


def remark(unit: Compilation, name: str, old: Differentiated, new: Differentiated) -> None:
    """Say in the dump what a block saves, before and now."""
    before, after = (sum(map(kept_bytes, saved_nodes(each))) for each in (old, new))
    assert new.backward is not None
    again = sum(n.meta.get("phase") == "recompute" for n in new.backward.graph.nodes)
    unit.remark(f"{name}: saves {after:,} bytes instead of {before:,}, {again} calls run again")


def record(unit: Compilation, name: str, suffix: str, programs: Differentiated) -> None:
    """Make the graphs of a block part of the compilation."""
    unit.graphs[f"{name}.forward{suffix}"] = programs.forward
    if programs.backward is not None:
        unit.graphs[f"{name}.backward{suffix}"] = programs.backward
