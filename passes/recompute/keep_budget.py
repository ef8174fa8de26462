"""Recompute in the backward what keeps every rank within the user's `MemoryBudget`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, Pass, UnitPass
from msc.ir.recompute import POLICIES, MemoryBudget
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Compilation, Variant
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.apply import record, remark
from msc.passes.recompute.budget import within_budget
from msc.passes.recompute.choice import Candidates, Choice, StageProgram
from msc.passes.recompute.policies import calls_again
from msc.passes.recompute.rewrite import recompute, saved_nodes
from msc.passes.schedules.timeline import peak_held
from msc.passes.trial import copied, peaks, trial_of_blocks

_NOT_SPLIT = (
    ", or a schedule such as '1f1b', whose backward is not split: what the input gradients have "
    "recomputed is else kept for the weight gradients"
)


@dataclass(frozen=True)
class KeepBudget(UnitPass):
    """Rewrite the forward and backward of distinct blocks, those of each pipeline stage alike.

    then: the passes that make a rank graph of the blocks, to predict the memory of a choice.

    A block whose graphs have other calls on other tp ranks, as unequal shards may need, is left
    out, so that all ranks issue the same collectives.
    """

    then: tuple[Pass, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "keep-budget"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        budget = unit.settings.recompute
        if not isinstance(budget, MemoryBudget):
            return 0
        stages = [
            StageProgram(blocks, lambda node: call_cost(node, unit.settings))
            for blocks in _candidates(unit)
        ]
        chosen = within_budget(
            stages,
            budget.bytes_per_rank,
            lambda choices: self._peaks(unit, choices),
            _NOT_SPLIT if unit.schedule.rules.split else "",
        )
        changes = 0
        for stage, choice in enumerate(chosen):
            for name, again in (choice.again if choice is not None else {}).items():
                changes += sum(_at_stage(variant, stage, name, again) for variant in unit.variants)
        for variant in unit.variants:
            for (stage, name), programs in variant.at_stage.items():
                block = f"{name}.stage{stage}"
                record(unit, block, variant.suffix, programs)
                remark(unit, block + variant.suffix, variant.differentiated[name], programs)
        return changes

    def _peaks(self, unit: Compilation, choices: Sequence[Choice | None]) -> list[int]:
        """The predicted bytes of each stage with some choices."""
        blocks = [_copies(variant, unit, choices) for variant in unit.variants]
        return peaks(trial_of_blocks(unit, blocks), self.then)


def _copies(
    variant: Variant, unit: Compilation, choices: Sequence[Choice | None]
) -> dict[tuple[int, str], Differentiated]:
    """Blocks with the choices of their stages, which passes may change."""
    found = {}
    for stage, choice in enumerate(choices):
        for name in sorted(set(unit.blocks_on(stage))):
            programs = variant.differentiated[name]
            again = choice.again.get(name, frozenset()) if choice is not None else ()
            new = recompute(programs, _same_calls(programs, again))
            found[stage, name] = copied(programs) if new is programs else new
    return found


def _candidates(unit: Compilation) -> list[list[Candidates]]:
    """The blocks of each stage among whose calls a budget may choose."""
    first = unit.variants[0]
    loss = unit.structure.instances[unit.structure.loss.instance].block
    alike = [
        name
        for name, programs in first.differentiated.items()
        if programs.backward is not None
        and all(_calls(v.differentiated[name]) == _calls(programs) for v in unit.variants)
    ]
    return [
        [
            Candidates(
                name,
                first.differentiated[name].forward,
                tuple(saved_nodes(first.differentiated[name])),
                _copies_held(unit, stage, name),
                tuple(
                    calls_again(policy, first.differentiated[name].forward, name == loss)
                    for policy in POLICIES
                ),
            )
            for name in alike
            if name in unit.blocks_on(stage)
        ]
        for stage in range(unit.schedule.stages.count)
    ]


def _calls(programs: Differentiated) -> list[tuple[str, object]]:
    return [(node.name, node.target) for node in programs.forward.graph.nodes]


def _copies_held(unit: Compilation, stage: int, block: str) -> int:
    """Of how many instances and micro-batches a stage holds at most what a block has saved."""
    names = [[unit.structure.instances[index].block for index in run] for run in unit.schedule.runs]
    return round(peak_held(unit.schedule.orders[stage], [run.count(block) for run in names]))


def _at_stage(variant: Variant, stage: int, name: str, again: Collection[fx.Node]) -> bool:
    """Let a block recompute calls on a stage; whether that changes it."""
    programs = variant.differentiated[name]
    new = recompute(programs, _same_calls(programs, again))
    if new is not programs:
        variant.at_stage[stage, name] = new
    return new is not programs


def _same_calls(programs: Differentiated, calls: Collection[fx.Node]) -> set[fx.Node]:
    """The calls of a block that are those `calls` of the first variant's."""
    names = {node.name for node in calls}
    return {node for node in programs.forward.graph.nodes if node.name in names}
