"""Recompute in the backward what the user's policy does not save; see `rewrite` for the picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, UnitPass
from msc.passes.compilation import Compilation
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.policies import full, selective
from msc.passes.recompute.rewrite import recompute


@dataclass(frozen=True)
class Recompute(UnitPass):
    """Rewrite the forward and backward of every distinct block by `Settings.recompute`."""

    name: ClassVar[str] = "recompute"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        policy = unit.settings.recompute
        if policy == "none":
            return 0
        loss = unit.structure.instances[unit.structure.loss.instance].block
        done: dict[int, Differentiated] = {}  # blocks that are alike on several variants
        changes = 0
        for variant in unit.variants:
            for name, programs in variant.differentiated.items():
                if id(programs) not in done:
                    again = _again(policy, programs.forward, name == loss)
                    new = done[id(programs)] = recompute(programs, again)
                    if new is not programs:
                        changes += 1
                        _record(unit, name, variant.suffix, new)
                variant.differentiated[name] = done[id(programs)]
        return changes


def _again(policy: str, forward: fx.GraphModule, has_loss: bool) -> set[fx.Node]:
    return full(forward) if policy == "full" and not has_loss else selective(forward)


def _record(unit: Compilation, name: str, suffix: str, programs: Differentiated) -> None:
    assert programs.backward is not None
    unit.graphs[f"{name}.forward{suffix}"] = programs.forward
    unit.graphs[f"{name}.backward{suffix}"] = programs.backward
